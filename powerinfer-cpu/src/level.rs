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

/// Proof that the CPU has AVX-512 with byte and word operations, 128-bit and 256-bit forms, and VNNI, besides all
/// of [`Avx2`].
///
/// Invariant LEVEL-DETECTED: as for [`Avx2`], only [`Avx512::detect`] makes a value.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Avx512(Avx2);

#[cfg(target_arch = "x86_64")]
impl Avx512 {
    /// Asks the CPU.
    pub fn detect() -> Option<Self> {
        let has = std::arch::is_x86_feature_detected!("avx512f")
            && std::arch::is_x86_feature_detected!("avx512bw")
            && std::arch::is_x86_feature_detected!("avx512dq")
            && std::arch::is_x86_feature_detected!("avx512vl")
            && std::arch::is_x86_feature_detected!("avx512vnni");
        Avx2::detect().filter(|_| has).map(Self)
    }

    /// The smaller level, for what has no kernel of its own here.
    pub fn avx2(self) -> Avx2 {
        self.0
    }
}

/// Proof that the CPU has NEON and its dot product instructions.
///
/// Invariant LEVEL-DETECTED: as for the levels of other CPUs, only [`Neon::detect`] makes a value.
#[cfg(target_arch = "aarch64")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Neon(());

#[cfg(target_arch = "aarch64")]
impl Neon {
    /// Asks the CPU.
    pub fn detect() -> Option<Self> {
        let has = std::arch::is_aarch64_feature_detected!("neon")
            && std::arch::is_aarch64_feature_detected!("dotprod");
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
    /// AVX-512 with BW, DQ, VL and VNNI (Ice Lake, Zen 4 and later).
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
    /// NEON with dot products (64-bit Arm v8.2 with the option, which v8.4 has always).
    #[cfg(target_arch = "aarch64")]
    Neon(Neon),
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
            #[cfg(target_arch = "x86_64")]
            Avx512::detect().map(Self::Avx512),
            #[cfg(target_arch = "aarch64")]
            Neon::detect().map(Self::Neon),
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
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => "avx512",
            #[cfg(target_arch = "aarch64")]
            Self::Neon(_) => "neon",
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
