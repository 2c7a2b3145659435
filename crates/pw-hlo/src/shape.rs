//! Shapes of arrays, and how the chunks of a collective lie in them.

use crate::collective::{Array, Element};
use crate::error::Result;
use crate::wire::fields;

const TUPLE: u32 = 13;

/// Field numbers of `ShapeProto`.
const ELEMENT_TYPE: u32 = 2;
const DIMENSIONS: u32 = 3;
const TUPLE_SHAPES: u32 = 4;
const LAYOUT: u32 = 5;
const IS_DYNAMIC: u32 = 6;

/// Field numbers of `LayoutProto`.
const MINOR_TO_MAJOR: u32 = 1;
const TILES: u32 = 6;
const ELEMENT_BITS: u32 = 7;
const DIM_LEVEL_TYPES: u32 = 9;
const PHYSICAL_SHAPE: u32 = 10;

/// A `ShapeProto`: an array, or a tuple of shapes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Shape {
    element: u32,
    dims: Vec<i64>,
    dynamic: bool,
    layout: Option<Layout>,
    elements: Vec<Shape>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Layout {
    minor_to_major: Vec<i64>,
    element_bits: i64,
    /// Tiled, sparse, or with a physical shape of its own.
    special: bool,
}

/// What a collective does with the dimension that it works along.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Along {
    /// There is none: operand and result are the same in size and layout.
    Nothing,
    /// The result is this dimension of the operand as often as there are ranks.
    Gather(usize),
    /// The other way round.
    Scatter(usize),
    /// Operand and result are the same, and cut into as many pieces as there are ranks.
    Exchange(usize),
}

/// Why a shape is not understood.
type Reason<T> = std::result::Result<T, String>;

impl Shape {
    /// Reads a `ShapeProto`.
    pub(crate) fn read(raw: &[u8]) -> Result<Shape> {
        let mut shape = Shape::default();
        for f in fields(raw) {
            let f = f?;
            match f.number {
                ELEMENT_TYPE => shape.element = u32::try_from(f.int()?).unwrap_or(0),
                DIMENSIONS => f.push_ints(&mut shape.dims)?,
                IS_DYNAMIC => {
                    let mut flags = Vec::new();
                    f.push_ints(&mut flags)?;
                    shape.dynamic |= flags.iter().any(|&flag| flag != 0);
                }
                TUPLE_SHAPES => shape.elements.push(Shape::read(f.bytes()?)?),
                LAYOUT => {
                    let mut layout = Layout::default();
                    for f in fields(f.bytes()?) {
                        let f = f?;
                        match f.number {
                            MINOR_TO_MAJOR => f.push_ints(&mut layout.minor_to_major)?,
                            ELEMENT_BITS => layout.element_bits = f.int()?,
                            TILES | DIM_LEVEL_TYPES | PHYSICAL_SHAPE => layout.special = true,
                            _ => {}
                        }
                    }
                    shape.layout = Some(layout);
                }
                _ => {}
            }
        }
        Ok(shape)
    }

    /// The messages of the elements of a tuple's `ShapeProto`.
    pub(crate) fn elements_of(raw: &[u8]) -> Result<Vec<&[u8]>> {
        fields(raw).filter(|f| f.as_ref().map_or(true, |f| f.number == TUPLE_SHAPES)).map(|f| f?.bytes()).collect()
    }

    /// Bytes of the array in memory; `None` where it is no array of a known type.
    pub(crate) fn bytes(&self) -> Option<u64> {
        let bits = if self.is_tuple() { None } else { self.element_bits().ok() };
        let elements = self.dims.iter().try_fold(1_u64, |product, &d| product.checked_mul(u64::try_from(d).ok()?));
        elements?.checked_mul(bits?).map(|bits| bits.div_ceil(8))
    }

    /// Whether any array is in it.
    pub(crate) fn has_array(&self) -> bool {
        if self.is_tuple() { self.elements.iter().any(Shape::has_array) } else { self.bytes().is_some() }
    }

    pub(crate) fn is_tuple(&self) -> bool {
        self.element == TUPLE
    }

    /// The array itself, or the arrays of a tuple.
    pub(crate) fn arrays(&self) -> &[Shape] {
        if self.is_tuple() { &self.elements } else { std::slice::from_ref(self) }
    }

    /// Dimensions from the most major one on.
    fn major_to_minor(&self) -> Reason<Vec<usize>> {
        let rank = self.dims.len();
        let order: Vec<usize> = match &self.layout {
            None if rank <= 1 => (0..rank).collect(),
            None => return Err("a shape has no layout".to_owned()),
            Some(layout) if layout.special => return Err("a layout is tiled or sparse".to_owned()),
            Some(layout) => layout.minor_to_major.iter().rev().map(|&d| usize::try_from(d).unwrap_or(usize::MAX)).collect(),
        };
        let mut sorted = order.clone();
        sorted.sort_unstable();
        if sorted.iter().copied().eq(0..rank) { Ok(order) } else { Err("a layout does not fit its shape".to_owned()) }
    }

    fn element_bits(&self) -> Reason<u64> {
        let stated = self.layout.as_ref().map_or(0, |layout| layout.element_bits);
        let natural = Element::from_code(self.element).bits().ok_or_else(|| format!("element type {} is not known", self.element))?;
        Ok(if stated > 0 { stated.unsigned_abs() } else { natural })
    }

    fn size(&self, dimension: usize) -> Reason<u64> {
        u64::try_from(self.dims[dimension]).map_err(|_| "a dimension is negative".to_owned())
    }
}

/// The memory view of an operand and its result in a group of so many ranks.
pub(crate) fn view(operand: &Shape, result: &Shape, along: Along, ranks: u64) -> Reason<Array> {
    for shape in [operand, result] {
        if shape.is_tuple() {
            return Err("a tuple stands where an array should".to_owned());
        }
        if shape.dynamic {
            return Err("a dimension is dynamic".to_owned());
        }
    }
    if operand.element != result.element || operand.element_bits()? != result.element_bits()? {
        return Err("operand and result have different element types".to_owned());
    }
    check_dims(operand, result, along, ranks)?;
    // The side on which the dimension has all its pieces, and the other one.
    let (whole, part, dimension) = match along {
        Along::Nothing => (operand, result, None),
        Along::Gather(d) => (result, operand, Some(d)),
        Along::Scatter(d) | Along::Exchange(d) => (operand, result, Some(d)),
    };
    let order = whole.major_to_minor()?;
    check_order(&order, part)?;

    let mut outer = 1_u64;
    let mut inner = 1_u64;
    let mut behind = dimension.is_none();
    for &d in &order {
        let mut size = whole.size(d)?;
        if Some(d) == dimension {
            behind = true;
            size /= ranks;
        }
        let product = if behind { &mut inner } else { &mut outer };
        *product = product.checked_mul(size).ok_or("an array is too large")?;
    }
    let bits = inner.checked_mul(whole.element_bits()?).ok_or("an array is too large")?;
    if !bits.is_multiple_of(8) && dimension.is_some() {
        return Err("a chunk ends within a byte".to_owned());
    }
    // No sizes of our own making overflow later on.
    outer.checked_mul(bits.div_ceil(8)).and_then(|bytes| bytes.checked_mul(ranks)).ok_or("an array is too large")?;
    Ok(Array { element: Element::from_code(whole.element), outer, chunk: bits.div_ceil(8) })
}

fn check_dims(operand: &Shape, result: &Shape, along: Along, ranks: u64) -> Reason<()> {
    let misfit = || Err(format!("operand {:?} does not give result {:?} with {ranks} ranks", operand.dims, result.dims));
    if operand.dims.len() != result.dims.len() {
        return misfit();
    }
    let (Along::Gather(dimension) | Along::Scatter(dimension) | Along::Exchange(dimension)) = along else {
        return if operand.dims == result.dims { Ok(()) } else { misfit() };
    };
    if dimension >= operand.dims.len() {
        return Err(format!("dimension {dimension} of a shape of rank {}", operand.dims.len()));
    }
    for d in 0..operand.dims.len() {
        let (from, to) = (operand.size(d)?, result.size(d)?);
        let fits = match along {
            Along::Gather(_) if d == dimension => Some(to) == from.checked_mul(ranks),
            Along::Scatter(_) if d == dimension => Some(from) == to.checked_mul(ranks),
            Along::Exchange(_) if d == dimension => from == to && from.is_multiple_of(ranks),
            _ => from == to,
        };
        if !fits {
            return misfit();
        }
    }
    Ok(())
}

/// Both sides must have their dimensions in one order; where a dimension of size 1 stands does not matter.
fn check_order(order: &[usize], part: &Shape) -> Reason<()> {
    let counts = |&d: &usize| part.dims[d] != 1;
    let part_order = part.major_to_minor()?;
    let ours: Vec<usize> = order.iter().copied().filter(counts).collect();
    let theirs: Vec<usize> = part_order.into_iter().filter(counts).collect();
    if ours == theirs { Ok(()) } else { Err("operand and result have different layouts".to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(element: u32, dims: &[i64], minor_to_major: &[i64]) -> Shape {
        let layout = Layout { minor_to_major: minor_to_major.to_vec(), ..Layout::default() };
        Shape { element, dims: dims.to_vec(), layout: Some(layout), ..Shape::default() }
    }

    const F32: u32 = 11;

    fn check(operand: Shape, result: Shape, along: Along, ranks: u64, outer: u64, chunk: u64) {
        let element = Element::from_code(operand.element);
        assert_eq!(view(&operand, &result, along, ranks), Ok(Array { element, outer, chunk }));
    }

    #[test]
    fn views_follow_the_layout() {
        check(shape(F32, &[3, 5], &[1, 0]), shape(F32, &[3, 5], &[1, 0]), Along::Nothing, 8, 1, 60);
        check(shape(F32, &[], &[]), shape(F32, &[], &[]), Along::Nothing, 8, 1, 4);
        check(shape(F32, &[3, 5], &[1, 0]), shape(F32, &[3, 20], &[1, 0]), Along::Gather(1), 4, 3, 20);
        check(shape(F32, &[3, 5], &[0, 1]), shape(F32, &[3, 20], &[0, 1]), Along::Gather(1), 4, 1, 60);
        check(shape(F32, &[3, 5], &[0, 1]), shape(F32, &[12, 5], &[0, 1]), Along::Gather(0), 4, 5, 12);
        check(shape(F32, &[2, 8, 3], &[0, 2, 1]), shape(F32, &[2, 2, 3], &[0, 2, 1]), Along::Scatter(1), 4, 1, 48);
        check(shape(F32, &[2, 8, 3], &[2, 1, 0]), shape(F32, &[2, 2, 3], &[2, 1, 0]), Along::Scatter(1), 4, 2, 24);
        check(shape(F32, &[2, 8, 3], &[1, 0, 2]), shape(F32, &[2, 8, 3], &[1, 0, 2]), Along::Exchange(1), 2, 6, 16);
        check(shape(1, &[7, 0], &[1, 0]), shape(1, &[7, 0], &[1, 0]), Along::Gather(1), 4, 7, 0);
        let plain = Shape { element: 4, dims: vec![6], ..Shape::default() };
        check(plain.clone(), plain, Along::Nothing, 1, 1, 24);
    }

    #[test]
    fn a_dimension_of_one_may_stand_anywhere() {
        check(shape(F32, &[1, 5], &[0, 1]), shape(F32, &[1, 5], &[1, 0]), Along::Nothing, 8, 1, 20);
        // The operand's gathered dimension is 1: only the result says where it is.
        check(shape(F32, &[5, 1], &[0, 1]), shape(F32, &[5, 4], &[1, 0]), Along::Gather(1), 4, 5, 4);
        check(shape(F32, &[5, 1], &[1, 0]), shape(F32, &[5, 4], &[0, 1]), Along::Gather(1), 4, 1, 20);
        check(shape(F32, &[5, 4], &[1, 0]), shape(F32, &[5, 1], &[0, 1]), Along::Scatter(1), 4, 5, 4);
    }

    #[test]
    fn small_elements_may_not_be_cut() {
        let packed = |dims: &[i64]| {
            let mut shape = shape(21, dims, &[1, 0]);
            shape.layout.as_mut().unwrap().element_bits = 4;
            shape
        };
        check(packed(&[3, 5]), packed(&[3, 5]), Along::Nothing, 2, 1, 8);
        check(packed(&[3, 4]), packed(&[6, 4]), Along::Gather(0), 2, 1, 6);
        assert_eq!(view(&packed(&[3, 5]), &packed(&[6, 5]), Along::Gather(0), 2), Err("a chunk ends within a byte".to_owned()));
        check(shape(21, &[3, 5], &[1, 0]), shape(21, &[6, 5], &[1, 0]), Along::Gather(0), 2, 1, 15);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let refused = |operand: &Shape, result: &Shape, along, text: &str| {
            let why = view(operand, result, along, 4).unwrap_err();
            assert!(why.contains(text), "{why}");
        };
        let a = shape(F32, &[3, 5], &[1, 0]);
        refused(&a, &shape(F32, &[3, 6], &[1, 0]), Along::Nothing, "does not give");
        refused(&a, &shape(F32, &[3, 5], &[0, 1]), Along::Nothing, "different layouts");
        refused(&a, &shape(F32, &[3, 20], &[0, 1]), Along::Gather(1), "different layouts");
        refused(&a, &shape(F32, &[3, 19], &[1, 0]), Along::Gather(1), "does not give");
        refused(&a, &shape(F32, &[3, 20], &[1, 0]), Along::Gather(2), "dimension 2 of a shape of rank 2");
        refused(&a, &a, Along::Exchange(1), "does not give");
        refused(&a, &shape(10, &[3, 5], &[1, 0]), Along::Nothing, "element types");
        refused(&a, &shape(F32, &[3, 5], &[0]), Along::Nothing, "does not fit its shape");
        let tuple = Shape { element: TUPLE, ..Shape::default() };
        refused(&tuple, &tuple, Along::Nothing, "tuple");
        let token = Shape { element: 17, ..Shape::default() };
        refused(&token, &token, Along::Nothing, "element type 17");
        let bare = Shape { layout: None, ..a.clone() };
        refused(&bare, &bare, Along::Nothing, "no layout");
        let mut tiled = a.clone();
        tiled.layout.as_mut().unwrap().special = true;
        refused(&tiled, &tiled, Along::Nothing, "tiled");
        let dynamic = Shape { dynamic: true, ..a };
        refused(&dynamic, &dynamic, Along::Nothing, "dynamic");
        let huge = shape(F32, &[1 << 40, 1 << 40], &[1, 0]);
        refused(&huge, &huge, Along::Nothing, "too large");
    }
}
