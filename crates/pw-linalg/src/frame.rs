//! What every handler does with its call frame: shapes, attributes, typed views of all results.

use pw_pjrt::{Attribute, BufferType, CallFrame};

use crate::lapack::{Plain, Result, Shape, elements, elements_mut, invalid};

/// The batch of matrices that an argument is, checked for its element type.
pub(crate) fn matrices(frame: &CallFrame<'_>, arg: usize, element_type: BufferType) -> Result<Shape> {
    let view = frame.arg(arg)?;
    if view.element_type != element_type {
        return Err(invalid(format!("linear algebra: argument {arg} is {:?}, not {element_type:?}", view.element_type)));
    }
    let [batch @ .., m, n] = view.dims else {
        return Err(invalid(format!("linear algebra: argument {arg} has {} dimensions, not two and those of a batch", view.dims.len())));
    };
    Ok(Shape { batch: product(batch)?, m: size(*m)?, n: size(*n)? })
}

/// The last dimension of an argument.
pub(crate) fn last(frame: &CallFrame<'_>, arg: usize) -> Result<usize> {
    let dims = frame.arg(arg)?.dims;
    dims.last().map_or_else(|| Err(invalid(format!("linear algebra: argument {arg} is a scalar"))), |&d| size(d))
}

fn size(dim: i64) -> Result<usize> {
    usize::try_from(dim).map_err(|_| invalid(format!("linear algebra: a dimension is {dim}")))
}

fn product(dims: &[i64]) -> Result<usize> {
    dims.iter().try_fold(1_usize, |product, &dim| {
        let next = product.checked_mul(size(dim)?);
        next.ok_or_else(|| invalid("linear algebra: a batch is too large".to_owned()))
    })
}

/// A character, which JAX passes as its number.
pub(crate) fn character(frame: &CallFrame<'_>, name: &str) -> Result<u8> {
    let value = frame.attribute_i64(name)?;
    u8::try_from(value).map_err(|_| invalid(format!("linear algebra: attribute {name:?} is {value}, no character")))
}

/// A truth value.
pub(crate) fn flag(frame: &CallFrame<'_>, name: &str) -> Result<bool> {
    match frame.attributes().remove(name) {
        Some(Attribute::Bool(value)) => Ok(value),
        other => Err(invalid(format!("linear algebra: attribute {name:?} is {other:?}, not true or false"))),
    }
}

/// The bytes of the only so many results.
pub(crate) fn exactly<const N: usize>(results: Vec<&mut [u8]>) -> Result<[&mut [u8]; N]> {
    let count = results.len();
    results.try_into().map_err(|_| invalid(format!("linear algebra: the call has {count} results, not {N}")))
}

/// The bytes of all results; no argument is wanted.
pub(crate) fn results<'f, const N: usize>(frame: &'f mut CallFrame<'_>) -> Result<[&'f mut [u8]; N]> {
    exactly(frame.views()?.results)
}

/// The elements of an argument that shares no memory with a result.
pub(crate) fn argument<'f, T: Plain>(args: &[Option<pw_pjrt::ArgView<'f>>], index: usize, element_type: BufferType) -> Result<&'f [T]> {
    match args.get(index) {
        Some(Some(view)) if view.element_type == element_type => elements(view.bytes),
        Some(Some(view)) => Err(invalid(format!("linear algebra: argument {index} is {:?}, not {element_type:?}", view.element_type))),
        Some(None) => Err(invalid(format!("linear algebra: argument {index} shares its memory with a result"))),
        None => Err(invalid(format!("linear algebra: there is no argument {index}"))),
    }
}

/// Typed views of several results.
macro_rules! typed {
    ($($name:ident),*) => { $(let $name = $crate::lapack::elements_mut($name)?;)* };
}
pub(crate) use typed;

/// The only result.
pub(crate) fn only<T: Plain>(results: Vec<&mut [u8]>) -> Result<&mut [T]> {
    let [result] = exactly(results)?;
    elements_mut(result)
}
