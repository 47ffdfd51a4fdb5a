//! Weights on the device: what lies where, and how it gets there.

use std::borrow::Cow;

use powerinfer_sparse_ops::{
    BackendError, DownWeights, EmbeddingWeights, FfnWeights, GateCopy, HeadWeights, LayerWeights, Linear,
    LowRank, ModelSpec, NeuronId, NeuronSet, NormWeights, WeightMatrix, WeightType,
};

use crate::gpu::{Buffer, Device, NAME, Piece, Plan, TYPES};
use crate::kernels::{CopyView, Matrix};

/// Rows that do not lie together are gathered in pieces of this size.
const GATHER_BYTES: usize = 8 << 20;

/// Most bytes of chunk sums that a tile of 8 tokens takes; more chunks than that are not made.
const PART_BYTES: usize = 32 << 20;

/// Tokens of a tile.
pub(crate) const TILE: usize = 8;

/// Rows of a chunk of the down projection, where a layer has few enough.
pub(crate) const CHUNK_ROWS: usize = 32;

/// Rows of a chunk of the down projection of `n_owned` neurons. It depends on the layer alone, so that sums are the
/// same in steps of any size.
pub(crate) fn chunk_rows(n_owned: usize, n_embd: usize) -> usize {
    n_owned.div_ceil(chunk_limit(n_embd)).next_multiple_of(CHUNK_ROWS).max(CHUNK_ROWS)
}

/// Most chunks of a down projection.
pub(crate) fn chunk_limit(n_embd: usize) -> usize {
    (PART_BYTES / (TILE * 4 * n_embd.max(1))).max(1)
}

/// Where a norm lies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NormPieces {
    pub(crate) weight: Piece,
    pub(crate) bias: Option<Piece>,
}

/// Where a matrix with its bias lies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LinearPieces {
    pub(crate) weight: Matrix,
    pub(crate) bias: Option<Piece>,
}

/// Token and position tables.
#[derive(Debug)]
pub(crate) struct Embedding {
    pub(crate) buffer: Buffer,
    pub(crate) token: Matrix,
    /// With the row of position 0.
    pub(crate) position: Option<(Matrix, usize)>,
}

/// Attention and norms of a layer.
#[derive(Debug)]
pub(crate) struct Dense {
    pub(crate) buffer: Buffer,
    /// Place among the layers of a cache, which has only those that are at home here.
    pub(crate) kv_layer: usize,
    pub(crate) attn_norm: NormPieces,
    pub(crate) attn_norm_2: Option<NormPieces>,
    pub(crate) ffn_norm: Option<NormPieces>,
    pub(crate) q: LinearPieces,
    pub(crate) k: LinearPieces,
    pub(crate) v: LinearPieces,
    pub(crate) output: LinearPieces,
    pub(crate) down_bias: Option<Piece>,
}

impl Dense {
    pub(crate) fn weight_bytes(&self) -> usize {
        [&self.q, &self.k, &self.v, &self.output].iter().map(|l| l.weight.n_bytes()).sum()
    }
}

/// Last norm and output matrix.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) buffer: Buffer,
    pub(crate) norm: NormPieces,
    pub(crate) output: Matrix,
}

/// The down projection in one of its two layouts.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Down {
    ByNeuron(Matrix),
    /// Of layers that are held whole.
    ByOutput(Matrix),
}

/// Neurons of a layer.
#[derive(Debug)]
pub(crate) struct Ffn {
    pub(crate) buffer: Buffer,
    pub(crate) gate: Option<Matrix>,
    pub(crate) up: Matrix,
    pub(crate) up_bias: Option<Piece>,
    pub(crate) down: Down,
    /// Neuron of each row.
    pub(crate) owned: Piece,
    pub(crate) ids: Vec<NeuronId>,
    pub(crate) n_ff: usize,
    pub(crate) chunk_rows: usize,
}

/// What names the neurons of a layer.
#[derive(Debug)]
pub(crate) enum Predictor {
    LowRank { buffer: Buffer, fc1: Matrix, fc2: Matrix, threshold: f32 },
    Copy { buffer: Buffer, copy: CopyPieces },
}

/// Where a 2-bit gate copy lies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CopyPieces {
    codes: Piece,
    scales: Piece,
    thresholds: Piece,
    outliers: Piece,
    outlier_weights: Piece,
    mean: Piece,
    n_ff: usize,
    n_embd: usize,
    pub(crate) n_padded: usize,
    pub(crate) n_outliers: usize,
    /// Bytes that scoring all neurons reads.
    pub(crate) n_bytes: usize,
}

impl CopyPieces {
    pub(crate) fn on(self, buffer: &Buffer) -> CopyView<'_> {
        CopyView {
            codes: buffer.piece(self.codes),
            scales: buffer.piece(self.scales),
            thresholds: buffer.piece(self.thresholds),
            outliers: buffer.piece(self.outliers),
            outlier_weights: buffer.piece(self.outlier_weights),
            mean: buffer.piece(self.mean),
            n_ff: self.n_ff,
            n_embd: self.n_embd,
            n_padded: self.n_padded,
            n_outliers: self.n_outliers,
            codes_len: self.codes.n_bytes,
        }
    }
}

/// Bytes that go to a piece.
enum Source<'w> {
    Bytes(Cow<'w, [u8]>),
    Rows(&'w WeightMatrix, &'w [NeuronId]),
}

/// A buffer in the making.
#[derive(Default)]
pub(crate) struct Loading<'w> {
    plan: Plan,
    sources: Vec<(Piece, Source<'w>)>,
    types: Vec<WeightType>,
}

impl<'w> Loading<'w> {
    fn bytes(&mut self, bytes: impl Into<Cow<'w, [u8]>>) -> Piece {
        let bytes = bytes.into();
        let piece = self.plan.add(bytes.len());
        self.sources.push((piece, Source::Bytes(bytes)));
        piece
    }

    pub(crate) fn floats(&mut self, values: &'w [f32]) -> Piece {
        self.bytes(bytemuck::cast_slice(values))
    }

    fn note_type(&mut self, ty: WeightType) {
        if !self.types.contains(&ty) {
            self.types.push(ty);
        }
    }

    fn matrix(&mut self, m: &'w WeightMatrix) -> Matrix {
        self.note_type(m.ty());
        let piece = self.bytes(m.bytes());
        Matrix { piece, ty: m.ty(), n_rows: m.n_rows(), n_cols: m.n_cols(), row_bytes: m.row_bytes() }
    }

    /// The rows `ids` of a matrix.
    fn rows(&mut self, m: &'w WeightMatrix, ids: &'w [NeuronId]) -> Matrix {
        self.note_type(m.ty());
        let piece = self.plan.add(ids.len() * m.row_bytes());
        self.sources.push((piece, Source::Rows(m, ids)));
        Matrix { piece, ty: m.ty(), n_rows: ids.len(), n_cols: m.n_cols(), row_bytes: m.row_bytes() }
    }

    fn linear(&mut self, linear: &'w Linear) -> LinearPieces {
        let weight = self.matrix(&linear.weight);
        LinearPieces { weight, bias: linear.bias.as_deref().map(|bias| self.floats(bias)) }
    }

    fn norm(&mut self, norm: &'w NormWeights) -> NormPieces {
        let weight = self.floats(&norm.weight);
        NormPieces { weight, bias: norm.bias.as_deref().map(|bias| self.floats(bias)) }
    }

    /// Takes the memory, brings everything there and makes the kernels of its types ready.
    pub(crate) fn finish(self, device: &mut Device, what: &str) -> Result<Buffer, BackendError> {
        for ty in self.types {
            device.gpu().load_kernels(Some(ty))?;
        }
        let buffer = device.alloc(self.plan, what)?;
        for (piece, source) in self.sources {
            let to = buffer.piece(piece);
            match source {
                Source::Bytes(bytes) => device.gpu().write(to, &bytes),
                Source::Rows(m, ids) => {
                    let mut gathered = Vec::new();
                    let at_once = (GATHER_BYTES / m.row_bytes().max(1)).max(1);
                    for (ix, ids) in ids.chunks(at_once).enumerate() {
                        gathered.clear();
                        ids.iter().for_each(|id| gathered.extend_from_slice(m.row(id.index())));
                        let part = to.sub(ix * at_once * m.row_bytes(), gathered.len());
                        device.gpu().write(part, &gathered);
                    }
                }
            }
        }
        Ok(buffer)
    }
}

/// Refuses types without kernels.
pub(crate) fn check_type(
    m: &WeightMatrix,
    role: &'static str,
    taken: &[WeightType],
) -> Result<(), BackendError> {
    BackendError::check_type(NAME, m, role, taken)
}

impl Embedding {
    pub(crate) fn load(w: &EmbeddingWeights, device: &mut Device) -> Result<Self, BackendError> {
        check_type(&w.token, "token embedding", &TYPES)?;
        if let Some((table, _)) = &w.position {
            check_type(table, "position embedding", &TYPES)?;
        }
        let mut loading = Loading::default();
        let token = loading.matrix(&w.token);
        let position = w.position.as_ref().map(|(table, first)| (loading.matrix(table), *first));
        Ok(Self { buffer: loading.finish(device, "the token embedding")?, token, position })
    }
}

impl Dense {
    pub(crate) fn load(w: &LayerWeights, kv_layer: usize, device: &mut Device) -> Result<Self, BackendError> {
        for linear in [&w.q, &w.k, &w.v, &w.output] {
            check_type(&linear.weight, "attention weight", &TYPES)?;
        }
        let mut loading = Loading::default();
        let attn_norm = loading.norm(&w.attn_norm);
        let attn_norm_2 = w.attn_norm_2.as_ref().map(|norm| loading.norm(norm));
        let ffn_norm = w.ffn_norm.as_ref().map(|norm| loading.norm(norm));
        let [q, k, v, output] = [&w.q, &w.k, &w.v, &w.output].map(|linear| loading.linear(linear));
        let down_bias = w.ffn_down_bias.as_deref().map(|bias| loading.floats(bias));
        let buffer = loading.finish(device, "attention weights")?;
        Ok(Self { buffer, kv_layer, attn_norm, attn_norm_2, ffn_norm, q, k, v, output, down_bias })
    }
}

impl Head {
    pub(crate) fn load(w: &HeadWeights, device: &mut Device) -> Result<Self, BackendError> {
        check_type(&w.output, "output matrix", &TYPES)?;
        let mut loading = Loading::default();
        let (norm, output) = (loading.norm(&w.norm), loading.matrix(&w.output));
        Ok(Self { buffer: loading.finish(device, "the output matrix")?, norm, output })
    }
}

impl Ffn {
    /// A down projection by output stays so if the layer is held whole, and its hidden values are then completed before it is
    /// read; of F16 or BF16 in a ReLU model it is turned, so that silent neurons can be skipped.
    pub(crate) fn load(
        spec: &ModelSpec,
        w: &FfnWeights,
        owned: &NeuronSet,
        device: &mut Device,
    ) -> Result<Self, BackendError> {
        const FLOATS: [WeightType; 3] = [WeightType::F32, WeightType::F16, WeightType::BF16];
        if let Some(gate) = &w.gate {
            check_type(gate, "FFN gate", &TYPES)?;
        }
        check_type(&w.up, "FFN up", &TYPES)?;
        let ids = owned.ids().to_vec();
        let turned = match &w.down {
            DownWeights::ByNeuron(m) => {
                check_type(m, "FFN down", &TYPES)?;
                None
            }
            DownWeights::ByOutput(m) if owned.is_all() => {
                check_type(m, "FFN down by output", &TYPES)?;
                let gains =
                    spec.activation.has_exact_zeros() && matches!(m.ty(), WeightType::F16 | WeightType::BF16);
                gains.then(|| m.transposed())
            }
            // Nothing of it is read.
            DownWeights::ByOutput(m) if ids.is_empty() => {
                Some(m.rows(0..0)).filter(|m| m.ty().is_float()).map(|m| m.transposed())
            }
            DownWeights::ByOutput(m) => {
                const ROLE: &str =
                    "FFN down by output of which it holds a part (blocks run over neurons there)";
                check_type(m, ROLE, &FLOATS)?;
                Some(m.transposed())
            }
        };
        let mut loading = Loading::default();
        let gate = w.gate.as_ref().map(|m| loading.rows(m, &ids));
        let up = loading.rows(&w.up, &ids);
        let up_bias: Option<Vec<f32>> =
            w.up_bias.as_ref().map(|bias| ids.iter().map(|id| bias[id.index()]).collect());
        let up_bias = up_bias.as_deref().map(|bias| loading.bytes(bytemuck::cast_slice(bias).to_vec()));
        let down = match (&w.down, &turned) {
            (_, _) if ids.is_empty() => Down::ByNeuron(Matrix { ..up }),
            (DownWeights::ByNeuron(m), _) | (DownWeights::ByOutput(_), Some(m)) => {
                Down::ByNeuron(loading.rows(m, &ids))
            }
            (DownWeights::ByOutput(m), None) => Down::ByOutput(loading.matrix(m)),
        };
        let neurons: Vec<u32> = ids.iter().map(|id| id.0).collect();
        let owned = loading.bytes(bytemuck::cast_slice(&neurons).to_vec());
        let buffer = loading.finish(device, "neurons")?;
        let chunk_rows = chunk_rows(ids.len(), spec.n_embd);
        Ok(Self { buffer, gate, up, up_bias, down, owned, n_ff: w.n_ff(), chunk_rows, ids })
    }
}

impl Predictor {
    pub(crate) fn low_rank(p: &LowRank, device: &mut Device) -> Result<Self, BackendError> {
        check_type(&p.fc1, "predictor", &TYPES)?;
        check_type(&p.fc2, "predictor", &TYPES)?;
        let mut loading = Loading::default();
        let (fc1, fc2) = (loading.matrix(&p.fc1), loading.matrix(&p.fc2));
        Ok(Self::LowRank { buffer: loading.finish(device, "a predictor")?, fc1, fc2, threshold: p.threshold })
    }

    pub(crate) fn copy(p: &GateCopy, device: &mut Device) -> Result<Self, BackendError> {
        let mut loading = Loading::default();
        let copy = CopyPieces {
            codes: loading.bytes(p.codes().as_slice()),
            scales: loading.floats(p.scales()),
            thresholds: loading.floats(p.thresholds()),
            outliers: loading.bytes(bytemuck::cast_slice::<u32, u8>(p.outliers())),
            outlier_weights: loading.bytes(bytemuck::cast_slice(p.outlier_weights())),
            mean: loading.floats(p.mean()),
            n_ff: p.n_ff(),
            n_embd: p.n_embd(),
            n_padded: p.n_padded(),
            n_outliers: p.n_outliers(),
            n_bytes: p.n_bytes(),
        };
        Ok(Self::Copy { buffer: loading.finish(device, "a predictor")?, copy })
    }

    /// Bytes that scoring all neurons reads.
    pub(crate) fn n_bytes(&self) -> usize {
        match self {
            Self::LowRank { fc1, fc2, .. } => fc1.n_bytes() + fc2.n_bytes(),
            Self::Copy { copy, .. } => copy.n_bytes,
        }
    }

    pub(crate) fn into_buffer(self) -> Buffer {
        match self {
            Self::LowRank { buffer, .. } | Self::Copy { buffer, .. } => buffer,
        }
    }
}
