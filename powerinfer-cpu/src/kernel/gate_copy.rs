//! Which of 64 neurons are active by the 2-bit copy of their gate, for one or a few tokens.
//!
//! A level computes `Σ u · q` of a row of codes and an 8-bit input, which is exact; the few operations in f32 that
//! follow are those of [`GateCopy::score_from_dot`] at every level, so all levels take the same decisions, and
//! they are those of [`GateCopy::score`].

use std::ops::Range;

use powerinfer_sparse_ops::{GateCopy, GateInput};

#[cfg(target_arch = "aarch64")]
use super::neon;
use super::scalar;
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};
use crate::level::CpuLevel;

/// Tokens that are scored at once; four rows of codes with as many sums each fill half of the AVX-512 registers.
pub(crate) const GATE_TILE: usize = 4;

/// Bytes that codes are asked for ahead of their use. Each row is shorter than what the processor's own prefetch needs to
/// get going: on one core of a 2.1 GHz Emerald Rapids, rows of 4096 came from memory at 6 GB/s without this, at 10
/// GB/s with 1 KiB, and at 12.7 GB/s with 4 KiB or 8 KiB (rows of 5120: 14.3 and 15.6), where plain reading made 14.4.
#[cfg(target_arch = "x86_64")]
const AHEAD_BYTES: usize = 8 << 10;

/// The codes some way behind these, to be prefetched.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) fn ahead(codes: &[u8; 64]) -> *const i8 {
    std::ptr::from_ref(codes).cast::<i8>().wrapping_add(AHEAD_BYTES)
}

/// The input of one token as [`GateCopy::quantize`] makes it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GateToken<'a> {
    /// `[n_padded]`.
    pub(crate) q: &'a [[i8; 256]],
    /// `[n_outliers]`.
    pub(crate) apart: &'a [f32],
    pub(crate) input: GateInput,
}

/// For each token, a bit for each of the neurons `64 · word ..`: whether it is active. Bits past the last neuron
/// are zero.
///
/// # Panics
/// If there is no such word or an input has another length than the copy asks for.
pub(crate) fn gate_word<const T: usize>(
    level: CpuLevel,
    p: &GateCopy,
    word: usize,
    tokens: [GateToken<'_>; T],
) -> [u64; T] {
    let neurons = word * 64..p.n_ff().min((word + 1) * 64);
    let rows =
        CodeRows { bytes: p.codes().as_slice(), row_bytes: p.row_bytes(), n_groups: p.n_padded() / 256 };
    for token in &tokens {
        assert_eq!(
            (token.q.len(), token.apart.len()),
            (rows.n_groups, p.n_outliers()),
            "input of a gate copy"
        );
    }
    match level {
        CpuLevel::Scalar => scalar::gate_copy::word(p, rows, neurons, tokens),
        #[cfg(target_arch = "x86_64")]
        CpuLevel::Avx2(level) => avx2::gate_copy::word(level, p, rows, neurons, tokens),
        #[cfg(target_arch = "x86_64")]
        CpuLevel::Avx512(level) => avx512::gate_copy::word(level, p, rows, neurons, tokens),
        #[cfg(target_arch = "aarch64")]
        CpuLevel::Neon(level) => neon::gate_copy::word(level, p, rows, neurons, tokens),
    }
}

/// The codes of a copy.
#[derive(Clone, Copy, Debug)]
pub(super) struct CodeRows<'a> {
    bytes: &'a [u8],
    row_bytes: usize,
    pub(super) n_groups: usize,
}

impl<'a> CodeRows<'a> {
    /// The codes of one neuron, `[n_groups]`.
    #[inline(always)]
    pub(super) fn row(&self, neuron: usize) -> &'a [[u8; 64]] {
        &self.bytes[neuron * self.row_bytes..].as_chunks().0[..self.n_groups]
    }
}

/// The bits of some neurons from their integer sums. Inlined, so that a level may use its own fused multiply-add.
#[inline(always)]
pub(super) fn active_bits<const T: usize>(
    p: &GateCopy,
    neurons: Range<usize>,
    dots: &[[i32; 64]; T],
    tokens: [GateToken<'_>; T],
) -> [u64; T] {
    let thresholds = &p.thresholds()[neurons.clone()];
    let mut words = [0; T];
    for t in 0..T {
        let mut scores = [0.0; 64];
        let (dots, scores) = (&dots[t][..neurons.len()], &mut scores[..neurons.len()]);
        p.scores_from_dots(neurons.clone(), dots, tokens[t].input, tokens[t].apart, scores);
        for (i, (score, threshold)) in scores.iter().zip(thresholds).enumerate() {
            // Written so that NaN counts as active.
            let inactive = score < threshold;
            words[t] |= u64::from(!inactive) << i;
        }
    }
    words
}

#[cfg(test)]
mod tests {

    use half::f16;
    use powerinfer_sparse_ops::{GateCopyParts, WeightBytes};
    use powerinfer_testing::tiny::Random;

    use super::*;

    fn random_copy(random: &mut Random, n_ff: usize, n_embd: usize, n_outliers: usize) -> GateCopy {
        let codes = (0..GateCopy::codes_len(n_ff, n_embd)).map(|_| random.next_u64() as u8).collect();
        let mut outliers: Vec<u32> = (0..n_outliers).map(|_| random.below(n_embd) as u32).collect();
        outliers.sort_unstable();
        outliers.dedup();
        GateCopy::try_new(GateCopyParts {
            n_ff,
            n_embd,
            codes: WeightBytes::from_vec(codes),
            scales: random.normals(n_ff, 0.1),
            thresholds: vec![f32::NEG_INFINITY; n_ff],
            outlier_weights: random
                .normals(n_ff * outliers.len(), 1.0)
                .into_iter()
                .map(f16::from_f32)
                .collect(),
            outliers,
            mean: random.normals(n_embd, 0.3),
        })
        .unwrap()
    }

    struct Owned {
        q: Vec<[i8; 256]>,
        apart: Vec<f32>,
        input: GateInput,
    }

    impl Owned {
        fn new(p: &GateCopy, x: &[f32]) -> Self {
            let mut q = vec![[0; 256]; p.n_padded() / 256];
            let mut apart = vec![0.0; p.n_outliers()];
            let input = p.quantize(x, q.as_flattened_mut(), &mut apart);
            Self { q, apart, input }
        }

        fn token(&self) -> GateToken<'_> {
            GateToken { q: &self.q, apart: &self.apart, input: self.input }
        }
    }

    /// Thresholds are the scores themselves or the next larger number, so that a difference in the last bit of a score
    /// shows.
    #[test]
    fn every_level_decides_as_the_slow_form_does() {
        let mut random = Random::new(3);
        for n_embd in [1, 5, 32, 64, 96, 224, 255, 256, 257, 288, 480, 512, 576, 800] {
            for n_ff in [1, 3, 4, 63, 64, 65, 130] {
                let n_outliers = random.below(4);
                let p = random_copy(&mut random, n_ff, n_embd, n_outliers);
                let x: Vec<Vec<f32>> = (0..GATE_TILE).map(|_| random.normals(n_embd, 1.0)).collect();
                let wanted: Vec<bool> = (0..n_ff).map(|_| random.below(2) == 0).collect();
                let thresholds = p.score(&x[0]).into_iter().zip(&wanted);
                let thresholds =
                    thresholds.map(|(s, &active)| if active { s } else { s.next_up() }).collect();
                let p = p.with_thresholds(thresholds).unwrap();
                let slow: Vec<Vec<bool>> = x
                    .iter()
                    .map(|x| p.score(x).into_iter().enumerate().map(|(i, s)| p.is_active(i, s)).collect())
                    .collect();
                assert_eq!(slow[0], wanted);
                let inputs: Vec<Owned> = x.iter().map(|x| Owned::new(&p, x)).collect();
                let tokens: [GateToken<'_>; GATE_TILE] = std::array::from_fn(|t| inputs[t].token());
                for level in CpuLevel::available() {
                    for word in 0..n_ff.div_ceil(64) {
                        let bits = gate_word(level, &p, word, tokens);
                        for (t, bits) in bits.into_iter().enumerate() {
                            let want = |i: &usize| slow[t].get(word * 64 + i).copied().unwrap_or(false);
                            let want = (0..64).filter(want).fold(0u64, |w, i| w | 1 << i);
                            assert_eq!(bits, want, "{level:?} [{n_embd}, {n_ff}], token {t}, word {word}");
                            let [alone] = gate_word(level, &p, word, [tokens[t]]);
                            assert_eq!(
                                alone, want,
                                "{level:?} [{n_embd}, {n_ff}], token {t} alone, word {word}"
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn infinite_thresholds_and_nan_inputs_decide_alone() {
        let mut random = Random::new(4);
        let p = random_copy(&mut random, 70, 288, 1);
        let thresholds =
            (0..70).map(|i| if i % 3 == 0 { f32::NEG_INFINITY } else { f32::INFINITY }).collect();
        let p = p.with_thresholds(thresholds).unwrap();
        let mut x = random.normals(288, 1.0);
        let third = (0..64).filter(|i| i % 3 == 0).fold(0u64, |w, i| w | 1 << i);
        for level in CpuLevel::available() {
            assert_eq!(gate_word(level, &p, 0, [Owned::new(&p, &x).token()]), [third]);
        }
        let outlier = p.outliers()[0] as usize;
        for at in [outlier, (outlier + 1) % 288] {
            let kept = std::mem::replace(&mut x[at], f32::NAN);
            for level in CpuLevel::available() {
                let token = Owned::new(&p, &x);
                assert_eq!(gate_word(level, &p, 0, [token.token()]), [u64::MAX], "{level:?}, column {at}");
                assert_eq!(gate_word(level, &p, 1, [token.token()]), [0b11_1111], "{level:?}, column {at}");
            }
            x[at] = kept;
        }
    }
}
