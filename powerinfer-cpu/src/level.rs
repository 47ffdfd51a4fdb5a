//! Which instruction set the kernels use.

/// Proof that the CPU has AVX2, FMA and F16C.
///
/// Invariant LEVEL-DETECTED: the field is private and only [`Avx2::detect`] makes a value, after the CPU said
/// that it has all three.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Avx2(());

#[cfg(target_arch = "x86_64")]
impl Avx2 {
    /// Asks the CPU.
    pub fn detect() -> Option<Self> {
        let has = std::arch::is_x86_feature_detected!("avx2")
            && std::arch::is_x86_feature_detected!("fma")
            && std::arch::is_x86_feature_detected!("f16c");
        has.then_some(Self(()))
    }
}

/// An instruction set that the kernels are written for and this CPU has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CpuLevel {
    /// Plain Rust.
    Scalar,
    /// AVX2 with FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
}

impl CpuLevel {
    /// The best level of this CPU.
    pub fn detect() -> Self {
        Self::available().into_iter().next_back().unwrap_or(Self::Scalar)
    }

    /// Every level of this CPU, slowest first.
    pub fn available() -> Vec<Self> {
        [
            Some(Self::Scalar),
            #[cfg(target_arch = "x86_64")]
            Avx2::detect().map(Self::Avx2),
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    /// A short name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => "avx2",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_level_is_the_last_available_one_and_scalar_is_always_there() {
        let all = CpuLevel::available();
        assert_eq!(all[0], CpuLevel::Scalar);
        assert_eq!(all[all.len() - 1], CpuLevel::detect());
        assert_eq!(all[0].name(), "scalar");
    }
}
