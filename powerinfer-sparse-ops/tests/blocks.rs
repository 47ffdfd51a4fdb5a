//! Blocks against data made by other code (`tools/make_block_goldens.py`), and their properties.

use std::path::Path;

use bytemuck::{AnyBitPattern, Pod, Zeroable};
use half::f16;
use powerinfer_sparse_ops::block::*;
use powerinfer_sparse_ops::{ActivationType, WeightType};

fn golden(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn golden_f32(name: &str) -> Vec<f32> {
    cast(&golden(name))
}

fn cast<T: AnyBitPattern>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}

fn decode(ty: WeightType, bytes: &[u8]) -> Vec<f32> {
    let mut out = vec![f32::NAN; bytes.len() / ty.block_bytes() * ty.block_len()];
    decode_row(ty, bytes, &mut out);
    out
}

fn encode(ty: WeightType, weights: &[f32]) -> Result<Vec<u8>, EncodeError> {
    let mut out = vec![0xAA; ty.row_bytes(weights.len()).expect("whole blocks")];
    encode_row(ty, weights, &mut out).map(|()| out)
}

/// SplitMix64.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }

    /// In −1 to 1.
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn vector(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| self.unit() * scale).collect()
    }

    fn blocks<B: Pod>(&mut self, n: usize) -> Vec<B> {
        let bytes: Vec<u8> = (0..n * size_of::<B>()).map(|_| self.next() as u8).collect();
        cast(&bytes)
    }
}

#[test]
fn decoders_agree_bit_for_bit_with_foreign_data() {
    for ty in WeightType::ALL {
        let name = ty.name().to_lowercase();
        let bytes = golden(&format!("{name}.blocks"));
        let expected = golden_f32(&format!("{name}.f32"));
        let got = decode(ty, &bytes);
        assert_eq!(got.len(), expected.len(), "{ty}");
        for (i, (g, e)) in got.iter().zip(&expected).enumerate() {
            assert_eq!(g.to_bits(), e.to_bits(), "{ty}, weight {i}: {g:e}, expected {e:e}");
        }
    }
}

#[test]
fn decoding_needs_no_alignment() {
    for ty in WeightType::ALL {
        let bytes = golden(&format!("{}.blocks", ty.name().to_lowercase()));
        let expected = decode(ty, &bytes);
        for shift in 1..4 {
            let shifted = [&[0; 4][..shift], &bytes].concat();
            assert_eq!(decode(ty, &shifted[shift..]), expected, "{ty}");
        }
    }
}

#[test]
fn encoders_agree_byte_for_byte_with_foreign_data() {
    let rows = golden_f32("encode.f32");
    for ty in [WeightType::F16, WeightType::BF16, WeightType::Q8_0, WeightType::Q4_0] {
        let expected = golden(&format!("encode.{}", ty.name().to_lowercase()));
        let got = encode(ty, &rows).unwrap();
        let blocks = got.chunks(ty.block_bytes()).zip(expected.chunks(ty.block_bytes()));
        for (i, (got, expected)) in blocks.enumerate() {
            assert_eq!(got, expected, "{ty}, block {i}");
        }
        assert_eq!(got.len(), expected.len());
    }
    assert_eq!(encode(WeightType::F32, &rows).unwrap(), golden("encode.f32"));
}

#[test]
fn rounded_vectors_agree_byte_for_byte_with_foreign_data() {
    let x = golden_f32("activations.f32");

    let mut q8_0 = vec![BlockQ8_0::zeroed(); x.len() / QK];
    quantize_q8_0(&x, &mut q8_0);
    assert_eq!(q8_0, cast(&golden("activations.q8_0")));

    let mut q8_1 = vec![BlockQ8_1::zeroed(); x.len() / QK];
    quantize_q8_1(&x, &mut q8_1);
    assert_eq!(q8_1, cast(&golden("activations.q8_1")));

    let mut q8_k = vec![BlockQ8K::zeroed(); x.len() / QK_K];
    quantize_q8_k(&x, &mut q8_k);
    assert_eq!(q8_k, cast(&golden("activations.q8_k")));
}

#[test]
fn weights_and_vectors_round_halves_differently() {
    let mut x = [0.0; QK];
    x[..5].copy_from_slice(&[127.0, 0.5, 1.5, 2.5, -2.5]);
    let weights: Vec<BlockQ8_0> = cast(&encode(WeightType::Q8_0, &x).unwrap());
    assert_eq!(weights[0].qs[..5], [127, 1, 2, 3, -3]);
    let mut vector = [BlockQ8_0::zeroed()];
    quantize_q8_0(&x, &mut vector);
    assert_eq!(vector[0].qs[..5], [127, 0, 2, 2, -2]);
}

#[test]
fn encoding_then_decoding_stays_within_half_a_step() {
    // Half a unit in the last place of a stored f16: relative, and absolute among the subnormals.
    let f16_error = |x: f32| (x.abs() * 2f32.powi(-11)).max(2f32.powi(-25));
    let mut rng = Rng(1);
    for case in 0..400 {
        let scale = 10f32.powi(case % 9 - 5);
        let w = rng.vector(QK, scale);
        let amax = w.iter().fold(0f32, |a, w| a.max(w.abs()));
        let peak = *w.iter().find(|w| w.abs() == amax).unwrap();
        let bound = |ty: WeightType, w: f32| match ty {
            WeightType::F32 => 0.0,
            WeightType::F16 => f16_error(w),
            WeightType::BF16 => w.abs() * 2f32.powi(-8),
            WeightType::Q8_0 => (0.5 + 1e-4) * amax / 127.0 + 127.0 * f16_error(amax / 127.0),
            WeightType::Q4_0 => {
                let step = amax / 8.0;
                // −8 to 7: on the side away from the peak there is one step less, so the last is a whole one.
                let clipped = w * peak.signum() < -7.5 * step;
                let steps = if clipped { 1.0 } else { 0.5 };
                (steps + 1e-4) * step + 8.0 * f16_error(step)
            }
            _ => unreachable!(),
        };
        for ty in [WeightType::F32, WeightType::F16, WeightType::BF16, WeightType::Q8_0, WeightType::Q4_0] {
            let got = decode(ty, &encode(ty, &w).unwrap());
            for (i, (&w, got)) in w.iter().zip(got).enumerate() {
                let (error, bound) = ((w - got).abs(), bound(ty, w));
                assert!(
                    error <= bound,
                    "case {case}, {ty}, weight {i}: {w:e} became {got:e}, bound {bound:e}"
                );
            }
        }
    }
}

#[test]
fn rounding_vectors_stays_within_half_a_step() {
    let mut rng = Rng(2);
    for case in 0..200 {
        let x = rng.vector(QK_K, 10f32.powi(case % 9 - 4));

        let mut q8_0 = vec![BlockQ8_0::zeroed(); 8];
        quantize_q8_0(&x, &mut q8_0);
        let mut q8_1 = vec![BlockQ8_1::zeroed(); 8];
        quantize_q8_1(&x, &mut q8_1);
        for ((x, a), b) in x.chunks(QK).zip(&q8_0).zip(&q8_1) {
            assert_eq!(a.qs, b.qs);
            assert_eq!(a.d, f16::from_f32(b.d));
            let sum: i32 = b.qs.iter().map(|&q| i32::from(q)).sum();
            assert_eq!(b.s, b.d * sum as f32);
            for (x, q) in x.iter().zip(b.qs) {
                assert!((x - b.d * f32::from(q)).abs() <= 0.5001 * b.d, "case {case}");
            }
        }

        let mut q8_k = [BlockQ8K::zeroed()];
        quantize_q8_k(&x, &mut q8_k);
        let [block] = q8_k;
        for (x, q) in x.iter().zip(block.qs) {
            // The largest value becomes −128; one as large on the other side is a whole step off.
            let steps = if q == 127 { 1.0001 } else { 0.5001 };
            assert!((x - block.d * f32::from(q)).abs() <= steps * block.d.abs(), "case {case}");
        }
        assert!(block.qs.contains(&-128));
        for (qs, sum) in block.qs.chunks(16).zip(block.bsums) {
            assert_eq!(qs.iter().map(|&q| i16::from(q)).sum::<i16>(), sum);
        }
    }
}

#[test]
fn f16_rounding_goes_to_even() {
    let step = 2f32.powi(-10);
    let mut x = [1.0 + 0.5 * step, 1.0 + 1.5 * step, -1.0 - 0.51 * step, 65504.0, 0.0, 2f32.powi(-26)];
    round_f16(&mut x);
    assert_eq!(x, [1.0, 1.0 + 2.0 * step, -1.0 - step, 65504.0, 0.0, 0.0]);
}

/// The dot of decoded weights and decoded values in f64, and the limit for a f32 result: 2^-20 of the sum of
/// magnitudes, which is sixteen roundings.
fn exact_dot(ty: WeightType, row: &[u8], x: &[f64]) -> (f64, f64) {
    let w = decode(ty, row);
    assert_eq!(w.len(), x.len());
    let dot = w.iter().zip(x).map(|(&w, x)| f64::from(w) * x).sum();
    let magnitude: f64 = w
        .chunks(ty.block_len())
        .zip(x.chunks(ty.block_len()))
        .map(|(w, x)| {
            // The largest weight of a block, because small ones may be differences of large numbers.
            let largest = w.iter().fold(0f64, |a, &w| a.max(f64::from(w).abs()));
            largest * x.iter().map(|x| x.abs()).sum::<f64>()
        })
        .sum();
    (dot, magnitude * 2f64.powi(-20))
}

fn check_dot<W: Pod, X: Pod>(
    ty: WeightType,
    set_scales: impl Fn(&mut Rng, &mut W),
    round: impl Fn(&[f32], &mut [X]),
    decode_x: impl Fn(&X) -> Vec<f64>,
    dot: impl Fn(&[W], &[X]) -> f32,
) {
    let mut rng = Rng(3);
    for case in 0..60 {
        let n_blocks = case % 6;
        let mut row: Vec<W> = rng.blocks(n_blocks);
        row.iter_mut().for_each(|w| set_scales(&mut rng, w));
        let x = rng.vector(n_blocks * ty.block_len(), 3.0);
        let mut rounded = vec![X::zeroed(); n_blocks];
        round(&x, &mut rounded);
        let decoded: Vec<f64> = rounded.iter().flat_map(&decode_x).collect();
        let (expected, limit) = exact_dot(ty, bytemuck::cast_slice(&row), &decoded);
        let got = f64::from(dot(&row, &rounded));
        assert!((got - expected).abs() <= limit, "{ty}, case {case}: {got}, expected {expected} ± {limit}");
        assert_eq!(n_blocks > 0, limit > 0.0);
    }
}

fn scale(rng: &mut Rng) -> f16 {
    f16::from_f32(rng.unit() * 0.1)
}

#[test]
fn dots_of_32_weight_blocks_are_those_of_the_decoded_values() {
    fn values(x: &BlockQ8_0) -> Vec<f64> {
        x.qs.iter().map(|&q| x.d.to_f64() * f64::from(q)).collect()
    }
    fn values_1(x: &BlockQ8_1) -> Vec<f64> {
        x.qs.iter().map(|&q| f64::from(x.d) * f64::from(q)).collect()
    }
    use WeightType as T;
    check_dot(T::Q4_0, |r, w: &mut BlockQ4_0| w.d = scale(r), quantize_q8_0, values, dot_q4_0_q8_0);
    check_dot(T::Q5_0, |r, w: &mut BlockQ5_0| w.d = scale(r), quantize_q8_0, values, dot_q5_0_q8_0);
    check_dot(T::Q8_0, |r, w: &mut BlockQ8_0| w.d = scale(r), quantize_q8_0, values, dot_q8_0_q8_0);
    check_dot(T::IQ4_NL, |r, w: &mut BlockIq4Nl| w.d = scale(r), quantize_q8_0, values, dot_iq4_nl_q8_0);
    check_dot(
        T::MXFP4,
        |r, w: &mut BlockMxfp4| w.e = 110 + (r.next() % 20) as u8,
        quantize_q8_0,
        values,
        dot_mxfp4_q8_0,
    );
    check_dot(
        T::Q4_1,
        |r, w: &mut BlockQ4_1| (w.d, w.m) = (scale(r), scale(r)),
        quantize_q8_1,
        values_1,
        dot_q4_1_q8_1,
    );
    check_dot(
        T::Q5_1,
        |r, w: &mut BlockQ5_1| (w.d, w.m) = (scale(r), scale(r)),
        quantize_q8_1,
        values_1,
        dot_q5_1_q8_1,
    );
}

#[test]
fn dots_of_256_weight_blocks_are_those_of_the_decoded_values() {
    fn values(x: &BlockQ8K) -> Vec<f64> {
        x.qs.iter().map(|&q| f64::from(x.d) * f64::from(q)).collect()
    }
    use WeightType as T;
    check_dot(
        T::Q2_K,
        |r, w: &mut BlockQ2K| (w.d, w.dmin) = (scale(r), scale(r)),
        quantize_q8_k,
        values,
        dot_q2_k_q8_k,
    );
    check_dot(T::Q3_K, |r, w: &mut BlockQ3K| w.d = scale(r), quantize_q8_k, values, dot_q3_k_q8_k);
    check_dot(
        T::Q4_K,
        |r, w: &mut BlockQ4K| (w.d, w.dmin) = (scale(r), scale(r)),
        quantize_q8_k,
        values,
        dot_q4_k_q8_k,
    );
    check_dot(
        T::Q5_K,
        |r, w: &mut BlockQ5K| (w.d, w.dmin) = (scale(r), scale(r)),
        quantize_q8_k,
        values,
        dot_q5_k_q8_k,
    );
    check_dot(T::Q6_K, |r, w: &mut BlockQ6K| w.d = scale(r), quantize_q8_k, values, dot_q6_k_q8_k);
}

#[test]
fn integers_inside_a_block_do_not_overflow() {
    let x = [BlockQ8K { d: 1.0, qs: [-128; QK_K], bsums: [-2048; 16] }];
    let w = [BlockQ6K { ql: [0; 128], qh: [0; 64], scales: [-128; 16], d: f16::ONE }];
    assert_eq!(dot_q6_k_q8_k(&w, &x), -(256.0 * 128.0 * 32.0 * 128.0));
    let w = [BlockQ5K { d: f16::ONE, dmin: f16::ONE, scales: [255; 12], qh: [255; 32], qs: [255; 128] }];
    assert_eq!(dot_q5_k_q8_k(&w, &x), -256.0 * 128.0 * (63.0 * 31.0 - 63.0));
}

#[test]
fn unsupported_types_are_named() {
    for ty in WeightType::ALL {
        let got = encode(ty, &[1.0; QK_K]);
        let has_encoder = ty.is_float() || matches!(ty, WeightType::Q8_0 | WeightType::Q4_0);
        if has_encoder {
            assert!(got.is_ok(), "{ty}");
        } else {
            let error = got.unwrap_err();
            assert_eq!(error, EncodeError::Unsupported { ty });
            assert!(error.to_string().contains(ty.name()), "{error}");
        }
    }
}

#[test]
fn weights_that_are_not_finite_are_refused_with_their_position() {
    for ty in [WeightType::F32, WeightType::F16, WeightType::BF16, WeightType::Q8_0, WeightType::Q4_0] {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut w = [0.5; 64];
            (w[37], w[41]) = (bad, bad);
            let error = encode(ty, &w).unwrap_err();
            assert!(matches!(error, EncodeError::NotFinite { index: 37, ty: t, .. } if t == ty), "{error}");
        }
    }
}

#[test]
fn weights_beyond_the_range_of_the_type_are_refused_with_their_position() {
    // The largest value that still fits, and one that does not.
    let cases = [
        (WeightType::F16, 65504.0, 65520.0),
        (WeightType::BF16, 3.389e38, f32::MAX),
        (WeightType::Q8_0, 65504.0 * 127.0, 65520.0 * 127.0),
        (WeightType::Q4_0, 65504.0 * 8.0, 65520.0 * 8.0),
    ];
    for (ty, fits, too_large) in cases {
        let mut w = [0.5; 64];
        w[41] = -fits;
        assert!(decode(ty, &encode(ty, &w).unwrap()).iter().all(|w| w.is_finite()), "{ty}");
        w[41] = -too_large;
        assert_eq!(encode(ty, &w), Err(EncodeError::TooLarge { ty, index: 41, value: -too_large }));
    }
}

#[test]
fn tiny_and_odd_values_do_no_harm() {
    for tiny in [f32::from_bits(1), 1e-40, f32::MIN_POSITIVE] {
        let w = [tiny; QK];
        for ty in [WeightType::Q8_0, WeightType::Q4_0] {
            assert_eq!(decode(ty, &encode(ty, &w).unwrap()), [0.0; QK], "{ty}");
        }
    }
    for odd in [f32::from_bits(1), 1e-40, f32::MAX, f32::NAN, f32::INFINITY] {
        let mut x = [0.0; QK_K];
        (x[3], x[200]) = (odd, -odd);
        quantize_q8_0(&x, &mut [BlockQ8_0::zeroed(); 8]);
        quantize_q8_1(&x, &mut [BlockQ8_1::zeroed(); 8]);
        quantize_q8_k(&x, &mut [BlockQ8K::zeroed(); 1]);
    }
    // ggml's Q4_0 of nothing but zeros has the scale −0, whatever the sign of the zeros.
    for zero in [0.0, -0.0] {
        assert_eq!(encode(WeightType::Q4_0, &[zero; QK]).unwrap()[..2], [0x00, 0x80]);
    }
}

#[test]
fn each_type_has_its_partner() {
    for ty in WeightType::ALL {
        let expected = match ty.name() {
            "F32" | "BF16" => ActivationType::F32,
            "F16" => ActivationType::F16,
            "Q4_1" | "Q5_1" => ActivationType::Q8_1,
            k if k.ends_with("_K") => ActivationType::Q8K,
            _ => ActivationType::Q8_0,
        };
        assert_eq!(ty.activation_type(), expected, "{ty}");
    }
}

#[test]
#[should_panic(expected = "a row of 32 weights in Q4_0 blocks of 32 needs Some(18) bytes, got 17")]
fn decoding_the_wrong_number_of_bytes_panics() {
    decode_row(WeightType::Q4_0, &[0; 17], &mut [0.0; 32]);
}

#[test]
#[should_panic(expected = "a row of 33 weights in Q8_0 blocks of 32 needs None bytes, got 34")]
fn encoding_a_broken_block_panics() {
    let _ = encode_row(WeightType::Q8_0, &[0.0; 33], &mut [0; 34]);
}

#[test]
#[should_panic(expected = "2 blocks of 32 cannot hold 32 values")]
fn rounding_into_too_many_blocks_panics() {
    quantize_q8_0(&[0.0; 32], &mut [BlockQ8_0::zeroed(); 2]);
}

#[test]
#[should_panic(expected = "a row of 2 blocks and a vector of 1")]
fn a_dot_of_different_lengths_panics() {
    dot_q4_0_q8_0(&[BlockQ4_0::zeroed(); 2], &[BlockQ8_0::zeroed(); 1]);
}
