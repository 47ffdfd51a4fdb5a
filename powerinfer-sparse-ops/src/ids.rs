//! Typed indices: a neuron is not a row is not a layer.

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u32);

        impl $name {
            /// The id as an index into a slice.
            #[inline]
            pub fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl From<$name> for usize {
            #[inline]
            fn from(id: $name) -> Self {
                id.0 as Self
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id!(
    /// A transformer layer, `0..n_layer`.
    LayerId
);
id!(
    /// An FFN neuron, `0..n_ff`: row of gate and up, row of transposed down.
    NeuronId
);
id!(
    /// A row inside one backend's own matrices; never mixed with [`NeuronId`].
    RowId
);
id!(
    /// A sequence: one KV cache.
    SeqId
);
id!(
    /// A token of the vocabulary, `0..n_vocab`.
    TokenId
);
