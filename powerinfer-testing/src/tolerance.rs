//! The limits under which results count as equal. Each has its reason; they stand nowhere else.

/// Normalised mean square error of a vector computed in f32 in another order of summation than the reference,
/// which sums in f64. A sum of a few thousand products in f32 is off by about 1e-7 relative; its square with a
/// factor of 100 for the layers in between.
pub const NMSE_F32: f64 = 1e-10;

/// The same where activations are rounded to 8 bits before the product: half a step of 1/127 of the block's
/// peak, about 0.5 % of the typical value, squared, with a factor of 8 for several layers.
pub const NMSE_8_BIT: f64 = 2e-4;

/// The same through a whole model with rows of two or three blocks: seven products in each of three layers, each
/// with a rounding of its own that little averages out.
pub const NMSE_8_BIT_TINY_MODEL: f64 = 8.0 * NMSE_8_BIT;

/// The same through the embedded model: twice as deep as what [`NMSE_8_BIT`] was made for, on rows long enough to
/// average.
pub const NMSE_8_BIT_DEMO_MODEL: f64 = 2.0 * NMSE_8_BIT;

/// Beyond this a residual stream has left the reference's, and not by rounding: above [`NMSE_8_BIT_TINY_MODEL`],
/// the most that rounding to 8 bits may make of it (over all goldens it makes at most 1e-4), and far below a wrong
/// matrix: one that is zero makes at least 2e-2 in them.
pub const NMSE_DIVERGED: f64 = 2e-3;

const _: () = assert!(NMSE_DIVERGED > NMSE_8_BIT_TINY_MODEL, "rounding is no divergence");

/// The same where keys and values are kept in f16: 2^-11 relative, squared, with a factor of 10.
pub const NMSE_F16_KV: f64 = 3e-6;

/// `|got − want|² / |want|²`.
///
/// # Panics
/// If the lengths differ or a value is not finite.
pub fn nmse(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len(), "lengths of compared vectors");
    let mut error = 0.0;
    let mut power = 0.0;
    for (ix, (&g, &w)) in got.iter().zip(want).enumerate() {
        assert!(g.is_finite() && w.is_finite(), "at {ix}: got {g}, want {w}");
        error += (f64::from(g) - f64::from(w)).powi(2);
        power += f64::from(w).powi(2);
    }
    if power == 0.0 { error } else { error / power }
}

/// Fails with the figures if two vectors differ by more than `limit` in [`nmse`].
///
/// # Panics
/// If they do.
pub fn assert_close(what: &str, got: &[f32], want: &[f32], limit: f64) {
    let error = nmse(got, want);
    assert!(
        error <= limit,
        "{what}: NMSE {error:.2e} is over {limit:.0e}; got {:?}…, want {:?}…",
        &got[..got.len().min(4)],
        &want[..want.len().min(4)]
    );
}
