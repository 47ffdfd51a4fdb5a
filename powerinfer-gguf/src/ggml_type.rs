//! The types a tensor may have in a file.

use std::fmt;

use powerinfer_sparse_ops::WeightType;

use crate::Magic;

macro_rules! ggml_types {
    ($($name:ident = $id:literal, $block_len:literal, $block_bytes:literal;)*) => {
        /// A tensor type that files may name, with the ids of today's GGUF.
        ///
        /// Those that can be computed with are listed in [`WeightType`]; see [`GgmlType::weight_type`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[expect(non_camel_case_types, reason = "the names under which these formats are known everywhere")]
        #[expect(missing_docs, reason = "a name is all there is to say")]
        #[non_exhaustive]
        pub enum GgmlType {
            $($name = $id,)*
        }

        impl GgmlType {
            /// Every type, in the order of ids.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The name as ggml prints it.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$name => stringify!($name),)*
                }
            }

            /// The id in files with the `GGUF` magic.
            const fn modern_id(self) -> u32 {
                match self {
                    $(Self::$name => $id,)*
                }
            }

            /// Values in one block.
            pub const fn block_len(self) -> usize {
                match self {
                    $(Self::$name => $block_len,)*
                }
            }

            /// Bytes of one block.
            pub const fn block_bytes(self) -> usize {
                match self {
                    $(Self::$name => $block_bytes,)*
                }
            }

            const fn from_modern_id(id: u32) -> Option<Self> {
                match id {
                    $($id => Some(Self::$name),)*
                    _ => None,
                }
            }
        }
    };
}

// id, values in a block, bytes of a block
ggml_types! {
    F32 = 0, 1, 4;
    F16 = 1, 1, 2;
    Q4_0 = 2, 32, 18;
    Q4_1 = 3, 32, 20;
    Q5_0 = 6, 32, 22;
    Q5_1 = 7, 32, 24;
    Q8_0 = 8, 32, 34;
    // Two f16 and 32 bytes in ggml. The Python package still counts two f32; no file stores this type.
    Q8_1 = 9, 32, 36;
    Q2_K = 10, 256, 84;
    Q3_K = 11, 256, 110;
    Q4_K = 12, 256, 144;
    Q5_K = 13, 256, 176;
    Q6_K = 14, 256, 210;
    Q8_K = 15, 256, 292;
    IQ2_XXS = 16, 256, 66;
    IQ2_XS = 17, 256, 74;
    IQ3_XXS = 18, 256, 98;
    IQ1_S = 19, 256, 50;
    IQ4_NL = 20, 32, 18;
    IQ3_S = 21, 256, 110;
    IQ2_S = 22, 256, 82;
    IQ4_XS = 23, 256, 136;
    I8 = 24, 1, 1;
    I16 = 25, 1, 2;
    I32 = 26, 1, 4;
    I64 = 27, 1, 8;
    F64 = 28, 1, 8;
    IQ1_M = 29, 256, 56;
    BF16 = 30, 1, 2;
    TQ1_0 = 34, 256, 54;
    TQ2_0 = 35, 256, 66;
    MXFP4 = 39, 32, 17;
    NVFP4 = 40, 64, 36;
    Q1_0 = 41, 128, 18;
}

impl GgmlType {
    /// The type that `id` stands for in a file with this magic: PowerInfer's files give 16, 17 and 18 to the
    /// integers I8, I16 and I32, and agree with GGUF otherwise.
    pub const fn from_id(id: u32, magic: Magic) -> Option<Self> {
        match (magic, id) {
            (Magic::Pwri, 16) => Some(Self::I8),
            (Magic::Pwri, 17) => Some(Self::I16),
            (Magic::Pwri, 18) => Some(Self::I32),
            _ => Self::from_modern_id(id),
        }
    }

    /// The id of this type in a file with this magic; `None` for the three types whose ids PowerInfer's
    /// files use otherwise.
    pub const fn id(self, magic: Magic) -> Option<u32> {
        match (magic, self) {
            (Magic::Pwri, Self::I8) => Some(16),
            (Magic::Pwri, Self::I16) => Some(17),
            (Magic::Pwri, Self::I32) => Some(18),
            (Magic::Pwri, Self::IQ2_XXS | Self::IQ2_XS | Self::IQ3_XXS) => None,
            _ => Some(self.modern_id()),
        }
    }

    /// The name of a type that files once used and that ggml has since removed.
    pub const fn removed_name(id: u32) -> Option<&'static str> {
        Some(match id {
            4 => "Q4_2",
            5 => "Q4_3",
            31 => "Q4_0_4_4",
            32 => "Q4_0_4_8",
            33 => "Q4_0_8_8",
            36 => "IQ4_NL_4_4",
            37 => "IQ4_NL_4_8",
            38 => "IQ4_NL_8_8",
            _ => return None,
        })
    }

    /// The type as one that is computed with; `None` if there is no kernel and no decoder for it.
    pub const fn weight_type(self) -> Option<WeightType> {
        Some(match self {
            Self::F32 => WeightType::F32,
            Self::F16 => WeightType::F16,
            Self::BF16 => WeightType::BF16,
            Self::Q4_0 => WeightType::Q4_0,
            Self::Q4_1 => WeightType::Q4_1,
            Self::Q5_0 => WeightType::Q5_0,
            Self::Q5_1 => WeightType::Q5_1,
            Self::Q8_0 => WeightType::Q8_0,
            Self::Q2_K => WeightType::Q2_K,
            Self::Q3_K => WeightType::Q3_K,
            Self::Q4_K => WeightType::Q4_K,
            Self::Q5_K => WeightType::Q5_K,
            Self::Q6_K => WeightType::Q6_K,
            Self::IQ4_NL => WeightType::IQ4_NL,
            Self::MXFP4 => WeightType::MXFP4,
            _ => return None,
        })
    }

    /// Whether values of this type are whole numbers.
    pub const fn is_integer(self) -> bool {
        matches!(self, Self::I8 | Self::I16 | Self::I32 | Self::I64)
    }

    /// Bytes of a row of `n_cols` values; `None` if the row is not a whole number of blocks, or too long.
    pub const fn row_bytes(self, n_cols: usize) -> Option<usize> {
        if !n_cols.is_multiple_of(self.block_len()) {
            return None;
        }
        match n_cols.checked_div(self.block_len()) {
            Some(n_blocks) => n_blocks.checked_mul(self.block_bytes()),
            None => None,
        }
    }
}

impl From<WeightType> for GgmlType {
    fn from(ty: WeightType) -> Self {
        Self::ALL
            .iter()
            .copied()
            .find(|candidate| candidate.weight_type() == Some(ty))
            .expect("every weight type has a file type, as a test of this module checks")
    }
}

impl fmt::Display for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weight_types_agree_with_file_types_in_name_and_block() {
        for ty in WeightType::ALL {
            let file_type = GgmlType::from(ty);
            assert_eq!(file_type.name(), ty.name());
            assert_eq!(file_type.block_len(), ty.block_len(), "{ty}");
            assert_eq!(file_type.block_bytes(), ty.block_bytes(), "{ty}");
        }
    }

    #[test]
    fn ids_go_there_and_back_under_both_magics() {
        for magic in [Magic::Gguf, Magic::Pwri] {
            for &ty in GgmlType::ALL {
                match ty.id(magic) {
                    Some(id) => assert_eq!(GgmlType::from_id(id, magic), Some(ty), "{ty} in {magic}"),
                    None => assert!(magic == Magic::Pwri && (16..=18).contains(&ty.modern_id()), "{ty}"),
                }
            }
        }
        assert_eq!(GgmlType::from_id(18, Magic::Pwri), Some(GgmlType::I32));
        assert_eq!(GgmlType::from_id(18, Magic::Gguf), Some(GgmlType::IQ3_XXS));
        assert_eq!(GgmlType::from_id(26, Magic::Pwri), Some(GgmlType::I32));
    }

    #[test]
    fn removed_ids_have_a_name_and_no_type() {
        for id in (0..64).filter(|&id| GgmlType::removed_name(id).is_some()) {
            assert_eq!(GgmlType::from_id(id, Magic::Gguf), None, "{id}");
        }
        assert_eq!(GgmlType::from_id(42, Magic::Gguf), None);
    }

    #[test]
    fn rows_are_whole_blocks() {
        assert_eq!(GgmlType::Q4_0.row_bytes(64), Some(36));
        assert_eq!(GgmlType::Q4_0.row_bytes(48), None);
        assert_eq!(GgmlType::F64.row_bytes(usize::MAX), None);
    }
}
