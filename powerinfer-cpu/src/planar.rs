//! 8-bit weights with integers and scales apart.

/// Which planar form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Planar {
    Q8_0,
    Q4_0,
    Q4_1,
}

/// One row of weights.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlanarRow<'a> {
    pub(crate) quants: &'a [u8],
    pub(crate) scales: &'a [u16],
    pub(crate) mins: &'a [u16],
}

/// One vector.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlanarX<'a> {
    pub(crate) q: &'a [i8],
    pub(crate) d: &'a [f32],
    pub(crate) sums: &'a [i32],
}
