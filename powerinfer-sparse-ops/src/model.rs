//! What a model is: dimensions, norms, rotation, FFN shape. No weights.

use crate::LayerId;

/// The FFN's activation function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Activation {
    /// `max(x, 0)`.
    Relu,
    /// `x · sigmoid(x)`.
    Silu,
    /// GELU, tanh approximation.
    Gelu,
}

impl Activation {
    /// Applies the function.
    #[inline]
    pub fn apply(self, x: f32) -> f32 {
        match self {
            // `max` would turn NaN into 0 and hide a fault.
            Self::Relu => {
                if x < 0.0 {
                    0.0
                } else {
                    x
                }
            }
            Self::Silu => x / (1.0 + (-x).exp()),
            Self::Gelu => {
                0.5 * x * (1.0 + ((2.0 / std::f32::consts::PI).sqrt() * x * (1.0 + 0.044_715 * x * x)).tanh())
            }
        }
    }

    /// Whether negative inputs give exactly zero, so that neurons can be skipped without loss.
    pub fn has_exact_zeros(self) -> bool {
        self == Self::Relu
    }

    /// The name in the key `<arch>.hidden_act`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Relu => "relu",
            Self::Silu => "silu",
            Self::Gelu => "gelu",
        }
    }
}

/// How a neuron's value is made from its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gating {
    /// `act(up · x + b)` (opt, falcon).
    None,
    /// `act(gate · x) · (up · x)` (llama).
    Gate,
    /// `act(gate · x) · act(up · x)` (bamboo).
    GateAndUp,
}

/// Kind of normalisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// `x / sqrt(mean(x²) + eps) · w`.
    Rms,
    /// `(x − mean(x)) / sqrt(var(x) + eps) · w + b`.
    Layer,
}

/// Normalisation with its epsilon.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    /// RMS or layer norm.
    pub kind: NormKind,
    /// Added to the mean square.
    pub eps: f32,
}

/// Order of attention and FFN in a layer, and with it what the predictor of a sparse file reads: always the
/// residual stream, unnormed, as it is when the FFN's turn comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockKind {
    /// `h += attn(norm(h)); h += ffn(norm(h))`. The predictor reads what attention left (llama, bamboo, opt).
    Sequential,
    /// `h += attn(norm(h)) + ffn(norm(h))`. The predictor reads the block's input (falcon).
    Parallel,
}

/// Which elements of a head are rotated together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeKind {
    /// Pairs `(2i, 2i + 1)` (llama files, whose rows the converter permuted).
    Interleaved,
    /// Pairs `(i, i + n_rot / 2)` (NeoX, falcon).
    Halves,
}

/// How positions beyond the trained context are squeezed.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Positions as they are.
    None,
    /// Positions divided by `factor`.
    Linear {
        /// Context growth, over 0.
        factor: f32,
    },
    /// YaRN (arXiv 2309.00071): low frequencies are interpolated, high ones are not.
    Yarn {
        /// Context growth, over 0.
        factor: f32,
        /// Context length the model was trained with.
        original_context: u32,
        /// Share of extrapolation; 1 in llama.cpp for `yarn`.
        ext_factor: f32,
        /// Extra factor on the magnitude.
        attn_factor: f32,
        /// Number of rotations over the original context above which nothing is interpolated.
        beta_fast: f32,
        /// Number of rotations below which everything is.
        beta_slow: f32,
    },
}

/// Rotary position embedding (arXiv 2104.09864), with everything but the position folded into a table.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Which elements form a pair.
    pub kind: RopeKind,
    /// Rotated elements of each head, even and at most `head_dim`; the rest passes unchanged.
    pub n_rot: usize,
    /// Angle per position for each pair, `[n_rot / 2]`, scaling and frequency factors included.
    pub freqs: Vec<f32>,
    /// Factor on cosine and sine; 1 except with YaRN.
    pub magnitude: f32,
}

impl Rope {
    /// Builds the table of frequencies `base^(−2i / n_rot)` under a scaling.
    ///
    /// `factors`, if given, divide the frequencies one by one (the tensor `rope_freqs.weight` of Llama-3
    /// files).
    ///
    /// # Shapes
    /// `factors [n_rot / 2]`.
    ///
    /// # Panics
    /// If `n_rot` is odd or `factors` has another length.
    pub fn new(
        kind: RopeKind,
        n_rot: usize,
        base: f32,
        scaling: &RopeScaling,
        factors: Option<&[f32]>,
    ) -> Self {
        assert!(n_rot.is_multiple_of(2), "n_rot {n_rot} is odd");
        let n_pairs = n_rot / 2;
        assert!(factors.is_none_or(|f| f.len() == n_pairs), "frequency factors must be [{n_pairs}]");
        let base = f64::from(base);
        let plain = |pair: usize| {
            base.powf(-2.0 * pair as f64 / n_rot as f64) / factors.map_or(1.0, |f| f64::from(f[pair]))
        };
        let (freqs, magnitude): (Vec<f64>, f64) = match *scaling {
            RopeScaling::None => ((0..n_pairs).map(plain).collect(), 1.0),
            RopeScaling::Linear { factor } => {
                ((0..n_pairs).map(|p| plain(p) / f64::from(factor)).collect(), 1.0)
            }
            RopeScaling::Yarn { factor, original_context, ext_factor, attn_factor, beta_fast, beta_slow } => {
                let (factor, ext_factor) = (f64::from(factor), f64::from(ext_factor));
                // The pair that turns `rotations` times over the original context.
                let pair_at = |rotations: f32| {
                    n_rot as f64
                        * (f64::from(original_context) / (f64::from(rotations) * std::f64::consts::TAU)).ln()
                        / (2.0 * base.ln())
                };
                let low = pair_at(beta_fast).floor().max(0.0);
                let high = pair_at(beta_slow).ceil().min(n_rot as f64 - 1.0);
                let freqs = (0..n_pairs).map(|p| {
                    let ramp = ((p as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
                    let extrapolated = (1.0 - ramp) * ext_factor;
                    plain(p) * ((1.0 - extrapolated) / factor + extrapolated)
                });
                let magnitude =
                    f64::from(attn_factor) * if ext_factor != 0.0 { 1.0 + 0.1 * factor.ln() } else { 1.0 };
                (freqs.collect(), magnitude)
            }
        };
        Self {
            kind,
            n_rot,
            freqs: freqs.into_iter().map(|f| f as f32).collect(),
            magnitude: magnitude as f32,
        }
    }

    /// The two elements of pair `pair` within a head.
    #[inline]
    pub fn pair(&self, pair: usize) -> (usize, usize) {
        match self.kind {
            RopeKind::Interleaved => (2 * pair, 2 * pair + 1),
            RopeKind::Halves => (pair, pair + self.n_rot / 2),
        }
    }
}

/// Everything about a model but its weights. The family is data here, not a copy of the forward pass.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    /// Family name, as in `general.architecture`.
    pub arch: String,
    /// Number of layers.
    pub n_layer: usize,
    /// Width of the residual stream.
    pub n_embd: usize,
    /// FFN neurons of each layer, `[n_layer]`.
    pub n_ff: Vec<usize>,
    /// Query heads.
    pub n_head: usize,
    /// Key and value heads; divides `n_head`.
    pub n_head_kv: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Rows of the embedding, columns of the logits.
    pub n_vocab: usize,
    /// Positions the model knows; none beyond it can be computed with a learned position table.
    pub n_ctx_train: usize,
    /// Norm used everywhere in the model.
    pub norm: Norm,
    /// Order of attention and FFN.
    pub block: BlockKind,
    /// Rotation of queries and keys; `None` with a learned position table.
    pub rope: Option<Rope>,
    /// The FFN's activation function.
    pub activation: Activation,
    /// How gate and up combine.
    pub gating: Gating,
    /// Whether the sparse semantics of PowerInfer files apply (magic `PWRI`).
    pub sparse_file: bool,
}

impl ModelSpec {
    /// Width of keys (and of values) of one token: `n_head_kv · head_dim`.
    pub fn kv_dim(&self) -> usize {
        self.n_head_kv * self.head_dim
    }

    /// Width of queries of one token: `n_head · head_dim`.
    pub fn q_dim(&self) -> usize {
        self.n_head * self.head_dim
    }

    /// The largest `n_ff` of any layer.
    pub fn max_n_ff(&self) -> usize {
        self.n_ff.iter().copied().max().unwrap_or(0)
    }

    /// Factor on query-key products: `1 / sqrt(head_dim)`.
    pub fn attn_scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    /// The layers in order.
    pub fn layers(&self) -> impl Iterator<Item = LayerId> + use<> {
        (0..self.n_layer as u32).map(LayerId)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relu_passes_nan_on() {
        assert!(Activation::Relu.apply(f32::NAN).is_nan());
        assert_eq!(Activation::Relu.apply(-1.0), 0.0);
    }

    #[test]
    fn linear_scaling_divides_and_factors_divide_the_frequencies() {
        let plain = Rope::new(RopeKind::Halves, 8, 10000.0, &RopeScaling::None, None);
        assert_eq!(plain.freqs, [1.0, 0.1, 0.01, 0.001]);
        let linear = Rope::new(RopeKind::Halves, 8, 10000.0, &RopeScaling::Linear { factor: 2.0 }, None);
        assert_eq!(linear.freqs, [0.5, 0.05, 0.005, 0.0005]);
        let scaled =
            Rope::new(RopeKind::Halves, 8, 10000.0, &RopeScaling::None, Some(&[1.0, 2.0, 4.0, 10.0]));
        assert_eq!(scaled.freqs, [1.0, 0.05, 0.0025, 0.0001]);
        assert_eq!(plain.pair(1), (1, 5));
    }

    #[test]
    fn yarn_keeps_high_frequencies_and_interpolates_low_ones() {
        let yarn = RopeScaling::Yarn {
            factor: 4.0,
            original_context: 2048,
            ext_factor: 1.0,
            attn_factor: 1.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
        };
        let rope = Rope::new(RopeKind::Interleaved, 64, 10000.0, &yarn, None);
        let plain = Rope::new(RopeKind::Interleaved, 64, 10000.0, &RopeScaling::None, None);
        assert_eq!(rope.freqs[0], plain.freqs[0]);
        assert_eq!(rope.freqs[31], plain.freqs[31] / 4.0);
        assert!((rope.magnitude - (1.0 + 0.1 * 4f32.ln())).abs() < 1e-6);
    }
}
