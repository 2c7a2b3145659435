//! What the plugin says that a run costs.

use crate::abi;
use crate::client::{AttributeValue, attribute};
use crate::error::Result;
use crate::executable::LoadedExecutable;
use crate::plugin::{slice, text};

impl LoadedExecutable {
    /// The figures of the plugin's own cost analysis, by name; UNIMPLEMENTED where it has none (XLA's CPU plugin).
    pub fn cost_analysis(&self) -> Result<Vec<(String, f64)>> {
        // SAFETY: the executable is alive; the list belongs to it and is copied.
        unsafe {
            let got = self.client().inner.api.call::<abi::ExecutableGetCostAnalysis>(|a| a.executable = self.raw_executable())?;
            let named = slice(got.properties, got.num_properties);
            let figures = named.iter().filter_map(|value| {
                let figure = match attribute(value)? {
                    AttributeValue::F32(figure) => f64::from(figure),
                    AttributeValue::I64(figure) => figure as f64,
                    _ => return None,
                };
                Some((text(value.name, value.name_size), figure))
            });
            Ok(figures.collect())
        }
    }
}
