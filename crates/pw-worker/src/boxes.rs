//! Arrays in host memory: where a box of one lies, and copying between dense and strided.

use pw_types::dtype::describe;
use pw_types::{DType, Region, Status};

/// Bytes that an array takes, first element to last, and the byte strides to walk it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Extent {
    pub(crate) bytes: usize,
    pub(crate) strides: Vec<i64>,
}

/// Where the elements of an array lie. `strides: None` = dense row-major.
pub(crate) fn extent(dtype: DType, dims: &[i64], strides: Option<&[i64]>) -> Result<Extent, Status> {
    let element = dtype.host_bytes() as i64;
    let wrong = || Status::invalid(format!("impossible array {} with byte strides {strides:?}", describe(dtype, dims)));
    if dims.iter().any(|&d| d < 0) || strides.is_some_and(|s| s.len() != dims.len() || s.iter().any(|&stride| stride < 0)) {
        return Err(wrong());
    }
    let strides = match strides {
        Some(strides) => strides.to_vec(),
        None => {
            let mut dense = vec![0; dims.len()];
            let mut next = element;
            for (stride, &dim) in dense.iter_mut().zip(dims).rev() {
                *stride = next;
                next = next.checked_mul(dim.max(1)).ok_or_else(wrong)?;
            }
            dense
        }
    };
    if dims.contains(&0) {
        return Ok(Extent { bytes: 0, strides });
    }
    let reach = dims.iter().zip(&strides).try_fold(element, |reach, (&dim, &stride)| reach.checked_add(stride.checked_mul(dim - 1)?));
    let bytes = reach.and_then(|n| usize::try_from(n).ok()).ok_or_else(wrong)?;
    Ok(Extent { bytes, strides })
}

/// First byte of a box in an array with these strides, and how many bytes it reaches over.
pub(crate) fn locate(dtype: DType, strides: &[i64], region: &Region) -> (usize, usize) {
    if region.dims.contains(&0) {
        return (0, 0);
    }
    // The box lies in the array and the array was measured: nothing overflows.
    let offset: i64 = region.start.iter().zip(strides).map(|(start, stride)| start * stride).sum();
    let reach: i64 = region.dims.iter().zip(strides).map(|(dim, stride)| (dim - 1) * stride).sum();
    (offset as usize, reach as usize + dtype.host_bytes() as usize)
}

/// Copies a dense row-major array to where `strides` say, from `to[0]` on.
pub(crate) fn scatter(to: &mut [u8], strides: &[i64], from: &[u8], dims: &[i64], element: usize) {
    if dims.contains(&0) {
        return;
    }
    // The innermost dimensions that are dense on both sides are one run of bytes.
    let mut run = element;
    let mut outer = dims.len();
    while outer > 0 && (strides[outer - 1] == run as i64 || dims[outer - 1] == 1) {
        run *= dims[outer - 1] as usize;
        outer -= 1;
    }
    let mut index = vec![0i64; outer];
    let mut offset = 0i64;
    for piece in from.chunks_exact(run) {
        to[offset as usize..offset as usize + run].copy_from_slice(piece);
        for d in (0..outer).rev() {
            index[d] += 1;
            offset += strides[d];
            if index[d] < dims[d] {
                break;
            }
            offset -= strides[d] * dims[d];
            index[d] = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents() {
        let bytes = |dims: &[i64], strides: Option<&[i64]>| extent(DType::F32, dims, strides).map(|e| e.bytes);
        assert_eq!(bytes(&[2, 3], None), Ok(24));
        assert_eq!(bytes(&[2, 3], Some(&[4, 8])), Ok(24));
        assert_eq!(bytes(&[2, 3], Some(&[100, 8])), Ok(120));
        assert_eq!(bytes(&[], None), Ok(4));
        assert_eq!(bytes(&[0, 3], None), Ok(0));
        assert!(bytes(&[-1], None).is_err());
        assert!(bytes(&[2], Some(&[-4])).is_err());
        assert!(bytes(&[2], Some(&[4, 4])).is_err());
        assert!(bytes(&[i64::MAX, i64::MAX], None).is_err());
        assert!(bytes(&[3, 3], Some(&[i64::MAX, 1])).is_err());
        assert_eq!(extent(DType::Token, &[], None).unwrap().bytes, 0);
    }

    #[test]
    fn boxes_are_located() {
        let strides = extent(DType::F32, &[4, 6], None).unwrap().strides;
        let region = |start: [i64; 2], dims: [i64; 2]| Region { start: start.to_vec(), dims: dims.to_vec() };
        assert_eq!(locate(DType::F32, &strides, &region([2, 0], [2, 6])), (48, 48));
        assert_eq!(locate(DType::F32, &strides, &region([1, 3], [2, 2])), (36, 32));
        assert_eq!(locate(DType::F32, &strides, &region([4, 0], [0, 6])), (0, 0));
    }

    #[test]
    fn scattering_is_what_indexing_says() {
        for (dims, strides) in [
            (vec![2, 3], vec![3, 1]),
            (vec![2, 3], vec![1, 2]),
            (vec![2, 3], vec![10, 2]),
            (vec![3, 1, 2], vec![4, 77, 1]),
            (vec![2, 2, 2], vec![16, 4, 1]),
            (vec![], vec![]),
        ] {
            let count: i64 = dims.iter().product();
            let from: Vec<u8> = (1..=count as u8).collect();
            let mut to = vec![0; 64];
            scatter(&mut to, &strides, &from, &dims, 1);
            let mut wanted = vec![0; 64];
            for (flat, &value) in from.iter().enumerate() {
                let (mut rest, mut at) = (flat as i64, 0);
                for (&dim, &stride) in dims.iter().zip(&strides).rev() {
                    at += rest % dim * stride;
                    rest /= dim;
                }
                wanted[at as usize] = value;
            }
            assert_eq!(to, wanted, "{dims:?} {strides:?}");
        }
    }
}
