//! Weights as the kernels read them, in memory of their own.
//!
//! [`Planner`] is told which matrices there are and where each belongs; [`Planner::fill`] then makes one block of
//! memory and lays them out in it. Rows of Q8_0, Q4_0 and Q4_1 are taken apart ([`planar`](crate::planar)), others
//! are copied as they are. Neurons may be bundled: the rows of several matrices that belong to one neuron lie one
//! after the other. What has been copied is released where it came from, so that there is one copy of the weights.

use std::sync::Arc;

use half::slice::{HalfBitsSliceExt as _, HalfFloatSliceExt as _};
use powerinfer_sparse_ops::{NeuronId, WeightMatrix, WeightType};
use sha2::{Digest as _, Sha256};

use crate::certificate::{self, Certificate, Norms};
use crate::kernel::{Floats, Row};
use crate::memory::{Fingerprint, Memory};
use crate::planar::{Planar, PlanarRows};
use crate::pool::Pool;
use crate::relaid::{self, RelaidDown};

/// Start of every matrix and bundle in memory, and of every row where that costs little: a cache line, and a vector
/// register of the largest kind.
const ALIGN: usize = 64;

/// Where the rows of a matrix lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    /// Offset of the first row.
    at: usize,
    /// Bytes from row to row.
    stride: usize,
}

/// A matrix `[n_rows, n_cols]` in the memory of a backend.
#[derive(Clone, Debug)]
pub(crate) struct Rows {
    memory: Arc<Memory>,
    ty: WeightType,
    n_rows: usize,
    n_cols: usize,
    row_bytes: usize,
    place: Place,
}

impl Rows {
    /// Weight type.
    pub(crate) fn ty(&self) -> WeightType {
        self.ty
    }

    /// Number of rows (outputs).
    pub(crate) fn n_rows(&self) -> usize {
        self.n_rows
    }

    /// Weights in a row (inputs).
    pub(crate) fn n_cols(&self) -> usize {
        self.n_cols
    }

    /// Bytes of a row, as many as in the file.
    pub(crate) fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Bytes of all rows.
    pub(crate) fn n_bytes(&self) -> usize {
        self.n_rows * self.row_bytes
    }

    /// The bytes of a row.
    #[inline]
    pub(crate) fn bytes(&self, row: usize) -> &[u8] {
        &self.memory.bytes()[self.place.at + row * self.place.stride..][..self.row_bytes]
    }

    /// The rows of a matrix that is laid out as `kind`.
    #[inline]
    pub(crate) fn planar(&self, kind: Planar) -> PlanarRows<'_> {
        let bytes = &self.memory.bytes()[self.place.at..];
        PlanarRows { kind, bytes, stride: self.place.stride, n_cols: self.n_cols }
    }

    /// A row for the kernels.
    #[inline]
    pub(crate) fn row(&self, row: usize) -> Row<'_> {
        if let Some(kind) = Planar::of(self.ty) {
            return Row::Planar(kind, self.planar(kind).row(row));
        }
        let bytes = self.bytes(row);
        match Floats::of_row(self.ty, bytes) {
            Some(floats) => Row::Floats(floats),
            None => Row::Blocks(self.ty, bytes),
        }
    }
}

/// How the bytes of a row are brought over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// As they are.
    Copied,
    /// Integers apart from scales.
    Planar(Planar),
}

/// A matrix, or the rows of it that are wanted.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    matrix: WeightMatrix,
    rows: Option<Arc<[NeuronId]>>,
}

impl Source {
    /// The rows of the neurons `of`.
    pub(crate) fn gathered(matrix: &WeightMatrix, of: Arc<[NeuronId]>) -> Self {
        Self { matrix: matrix.clone(), rows: Some(of) }
    }

    pub(crate) fn matrix(&self) -> &WeightMatrix {
        &self.matrix
    }

    /// Number of wanted rows.
    pub(crate) fn n_rows(&self) -> usize {
        self.rows.as_ref().map_or(self.matrix.n_rows(), |rows| rows.len())
    }

    /// Which row of the matrix the wanted row `i` is.
    fn index(&self, i: usize) -> usize {
        self.rows.as_ref().map_or(i, |rows| rows[i].index())
    }
}

impl From<&WeightMatrix> for Source {
    fn from(matrix: &WeightMatrix) -> Self {
        Self { matrix: matrix.clone(), rows: None }
    }
}

#[derive(Debug)]
struct Part {
    source: Source,
    form: Form,
    /// Offset in the bundle.
    at: usize,
}

/// Matrices whose rows lie together.
#[derive(Debug)]
struct Bundle {
    at: usize,
    stride: usize,
    n_rows: usize,
    parts: Vec<Part>,
}

/// A down projection that is turned to by neuron.
#[derive(Debug)]
struct Turned {
    at: usize,
    source: WeightMatrix,
}

/// The [`Certificate`] of a gate.
#[derive(Debug)]
struct Certified {
    copy: Place,
    norms_at: usize,
    source: Source,
}

impl Certified {
    /// Rows that are copied together; norms and copies of such a piece are whole cache lines.
    const PIECE: usize = 32;

    fn n_pieces(&self) -> usize {
        self.source.n_rows().div_ceil(Self::PIECE)
    }

    /// Offset of the first byte behind it.
    fn end(&self) -> usize {
        self.norms_at + self.n_pieces() * Self::PIECE * size_of::<Norms>()
    }

    fn fill(&self, pool: &mut Pool, memory: &mut [u8]) {
        let n_cols = self.source.matrix.n_cols();
        let (copy, norms) = memory[self.copy.at..self.end()].split_at_mut(self.norms_at - self.copy.at);
        let copy = (copy, Self::PIECE * self.copy.stride);
        let norms: (&mut [Norms], usize) = (bytemuck::cast_slice_mut(norms), Self::PIECE);
        pool.run_zipped(copy, norms, (&mut [0u8; 0], 0), |piece, copy, norms, _| {
            let mut row = vec![0.0; n_cols];
            let rows = piece * Self::PIECE..self.source.n_rows();
            for (i, (out, norms)) in rows.zip(copy.chunks_exact_mut(self.copy.stride).zip(norms)) {
                decode_row(&self.source.matrix, self.source.index(i), &mut row);
                let (quants, scales) = out[..certificate::copy_bytes(n_cols)].split_at_mut(n_cols);
                *norms = certificate::copy_row(&row, quants, bytemuck::cast_slice_mut(scales));
            }
        });
    }
}

/// A certificate that is planned, to be had from [`Filled`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PlannedCertificate(usize);

/// A turned down projection that is planned, to be had from [`Filled`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PlannedTurned(usize);

/// A matrix that is planned, to be had from [`Filled`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Planned {
    bundle: usize,
    part: usize,
}

/// Says where in memory every matrix goes.
#[derive(Debug, Default)]
pub(crate) struct Planner {
    n_bytes: usize,
    bundles: Vec<Bundle>,
    turned: Vec<Turned>,
    certified: Vec<Certified>,
}

impl Planner {
    /// A matrix by itself, for products with whole rows.
    pub(crate) fn matrix(&mut self, source: impl Into<Source>) -> Planned {
        let source = source.into();
        let form = Planar::of(source.matrix.ty()).map_or(Form::Copied, Form::Planar);
        self.bundle([(source, form)])[0]
    }

    /// The matrices `dots`, for products with whole rows, and `axpy`, whose rows are added as they are in the file:
    /// row `i` of all of them together.
    ///
    /// # Panics
    /// If they have different numbers of rows.
    pub(crate) fn neurons<S: Into<Source>>(
        &mut self,
        dots: impl IntoIterator<Item = S>,
        axpy: Option<S>,
    ) -> Vec<Planned> {
        let dots = dots.into_iter().map(|source| {
            let source = source.into();
            let form = Planar::of(source.matrix.ty()).map_or(Form::Copied, Form::Planar);
            (source, form)
        });
        self.bundle(dots.chain(axpy.map(|source| (source.into(), Form::Copied))))
    }

    /// A Q8_0 down projection `[n_embd, n_ff]`, turned to by neuron.
    pub(crate) fn turned(&mut self, source: &WeightMatrix) -> PlannedTurned {
        let (n_embd, n_ff) = (source.n_rows(), source.n_cols());
        self.turned.push(Turned { at: self.n_bytes, source: source.clone() });
        self.n_bytes =
            (self.n_bytes + n_ff / relaid::BLOCK * relaid::block_bytes(n_embd)).next_multiple_of(ALIGN);
        PlannedTurned(self.turned.len() - 1)
    }

    /// The certificate of a gate, besides the gate itself.
    pub(crate) fn certificate(&mut self, gate: &Source) -> PlannedCertificate {
        let stride = stride_of(certificate::copy_bytes(gate.matrix.n_cols()));
        let n_rows = gate.n_rows().next_multiple_of(Certified::PIECE);
        let copy = Place { at: self.n_bytes, stride };
        let certified = Certified { copy, norms_at: copy.at + n_rows * stride, source: gate.clone() };
        self.n_bytes = certified.end();
        self.certified.push(certified);
        PlannedCertificate(self.certified.len() - 1)
    }

    fn bundle(&mut self, matrices: impl IntoIterator<Item = (Source, Form)>) -> Vec<Planned> {
        let mut parts = Vec::new();
        let mut stride = 0;
        for (source, form) in matrices {
            // Rows of one type with another are aligned for the largest scalar.
            let at = usize::next_multiple_of(stride, 4);
            stride = at + source.matrix.row_bytes();
            parts.push(Part { source, form, at });
        }
        let n_rows = parts[0].source.n_rows();
        assert!(parts.iter().all(|p| p.source.n_rows() == n_rows), "{parts:?}: rows of a bundle");
        let stride = stride_of(stride);
        let bundle = self.bundles.len();
        let planned = (0..parts.len()).map(|part| Planned { bundle, part }).collect();
        self.bundles.push(Bundle { at: self.n_bytes, stride, n_rows, parts });
        self.n_bytes = (self.n_bytes + n_rows * stride).next_multiple_of(ALIGN);
        planned
    }

    /// Bytes of memory that the plan takes.
    pub(crate) fn n_bytes(&self) -> usize {
        self.n_bytes
    }

    /// What the plan and the weights are: names, types, shapes and places, and 64 samples of the bytes of each matrix.
    /// Weights that were trained further differ nearly everywhere.
    pub(crate) fn fingerprint(&self) -> Fingerprint {
        let mut hash = Sha256::new();
        let mut matrix = |source: &Source, at: usize, stride: usize| {
            let m = &source.matrix;
            for row in source.rows.iter().flat_map(|rows| rows.iter()) {
                hash.update(row.0.to_le_bytes());
            }
            hash.update(m.name().as_bytes());
            hash.update(m.ty().name().as_bytes());
            for number in [m.n_rows(), m.n_cols(), at, stride] {
                hash.update((number as u64).to_le_bytes());
            }
            let (bytes, n) = (m.bytes(), m.n_bytes());
            for sample in 0..64 {
                let at = n.saturating_sub(64) * sample / 63;
                hash.update(&bytes[at..n.min(at + 64)]);
            }
            // A sample brings in the pages around it.
            m.release();
        };
        for bundle in &self.bundles {
            bundle.parts.iter().for_each(|part| matrix(&part.source, bundle.at + part.at, bundle.stride));
        }
        self.turned.iter().for_each(|turned| matrix(&Source::from(&turned.source), turned.at, 0));
        self.certified.iter().for_each(|c| matrix(&c.source, c.copy.at, c.copy.stride));
        hash.finalize().into()
    }

    /// Copies everything into `memory`, which has [`Planner::n_bytes`], a bundle after the other, and calls
    /// `progress(bytes done)` after each.
    pub(crate) fn fill(&self, pool: &mut Pool, memory: &mut [u8], progress: &mut dyn FnMut(usize)) {
        let mut done = 0;
        // Before the gates, which are released when they have been copied.
        for certified in &self.certified {
            certified.fill(pool, memory);
            done += certified.end() - certified.copy.at;
            progress(done);
        }
        for bundle in &self.bundles {
            let end = bundle.at + bundle.n_rows * bundle.stride;
            // About 256 KiB a piece.
            let rows = (1 << 18) / bundle.stride.max(1) + 1;
            pool.run_pieces(&mut memory[bundle.at..end], rows * bundle.stride, |piece, out| {
                for (i, out) in out.chunks_exact_mut(bundle.stride).enumerate() {
                    for part in &bundle.parts {
                        part.copy_row(piece * rows + i, &mut out[part.at..]);
                    }
                }
            });
            bundle.parts.iter().for_each(|part| part.source.matrix.release());
            done += end - bundle.at;
            progress(done);
        }
        for Turned { at, source } in &self.turned {
            let block = relaid::block_bytes(source.n_rows());
            let n_bytes = source.n_cols() / relaid::BLOCK * block;
            pool.run_pieces(&mut memory[*at..at + n_bytes], block, |b, out| {
                relaid::turn_block(source, b, out);
            });
            source.release();
            done += n_bytes;
            progress(done);
        }
    }

    /// The matrices in `memory` that [`Planner::fill`] wrote.
    pub(crate) fn filled(self, memory: Memory) -> Filled {
        assert!(memory.bytes().len() >= self.n_bytes, "memory of {} bytes", memory.bytes().len());
        Filled { planner: self, memory: Arc::new(memory) }
    }
}

/// As [`WeightMatrix::decode_row`]; F16, of which there is much, in vectors.
fn decode_row(matrix: &WeightMatrix, row: usize, out: &mut [f32]) {
    if let Some(Floats::F16(bits)) = Floats::of_row(matrix.ty(), matrix.row(row)) {
        bits.reinterpret_cast::<half::f16>().convert_to_f32_slice(out);
    } else {
        matrix.decode_row(row, out);
    }
}

/// Bytes from row to row: a multiple of [`ALIGN`] where that costs little.
fn stride_of(row_bytes: usize) -> usize {
    let aligned = row_bytes.next_multiple_of(ALIGN);
    if (aligned - row_bytes) * 50 <= row_bytes { aligned } else { row_bytes.next_multiple_of(4) }
}

impl Part {
    fn copy_row(&self, row: usize, out: &mut [u8]) {
        let source = self.source.matrix.row(self.source.index(row));
        let out = &mut out[..source.len()];
        match self.form {
            Form::Copied => out.copy_from_slice(source),
            Form::Planar(kind) => {
                let (quants, scales) = out.split_at_mut(kind.quant_bytes(self.source.matrix.n_cols()));
                kind.split(source, quants, bytemuck::cast_slice_mut(scales));
            }
        }
    }
}

/// A plan and the memory that it was carried out in.
#[derive(Debug)]
pub(crate) struct Filled {
    planner: Planner,
    memory: Arc<Memory>,
}

impl Filled {
    /// A turned down projection of the plan.
    pub(crate) fn relaid(&self, planned: PlannedTurned) -> RelaidDown {
        let turned = &self.planner.turned[planned.0];
        RelaidDown::new(Arc::clone(&self.memory), turned.at, turned.source.n_rows())
    }

    /// A certificate of the plan.
    pub(crate) fn certificate(&self, planned: PlannedCertificate) -> Certificate {
        let certified = &self.planner.certified[planned.0];
        let n_cols = certified.source.matrix.n_cols();
        let copy = Rows {
            memory: Arc::clone(&self.memory),
            ty: WeightType::Q8_0,
            n_rows: certified.source.n_rows(),
            n_cols,
            row_bytes: certificate::copy_bytes(n_cols),
            place: certified.copy,
        };
        Certificate::new(copy, Arc::clone(&self.memory), certified.norms_at)
    }

    /// A matrix of the plan.
    pub(crate) fn rows(&self, planned: Planned) -> Rows {
        let bundle = &self.planner.bundles[planned.bundle];
        let part = &bundle.parts[planned.part];
        Rows {
            memory: Arc::clone(&self.memory),
            ty: part.source.matrix.ty(),
            n_rows: bundle.n_rows,
            n_cols: part.source.matrix.n_cols(),
            row_bytes: part.source.matrix.row_bytes(),
            place: Place { at: bundle.at + part.at, stride: bundle.stride },
        }
    }
}

#[cfg(test)]
mod tests {
    use powerinfer_testing::tiny::{Random, encoded};

    use super::*;

    fn fill(planner: Planner, n_threads: usize) -> Filled {
        let mut memory = crate::memory::anonymous(planner.n_bytes(), true).unwrap();
        let mut last = 0;
        planner.fill(&mut Pool::try_new(n_threads).unwrap(), &mut memory, &mut |done| {
            assert!(done > last && done <= planner.n_bytes());
            last = done;
        });
        planner.filled(Memory::Anonymous(memory.make_read_only().unwrap()))
    }

    fn random(random: &mut Random, ty: WeightType, n_rows: usize, n_cols: usize) -> WeightMatrix {
        encoded("w", ty, n_rows, n_cols, &random.normals(n_rows * n_cols, 1.0))
    }

    #[test]
    fn bundles_hold_every_row_of_every_matrix() {
        let mut rng = Random::new(1);
        for (gate_ty, down_ty) in [
            (WeightType::F16, WeightType::F32),
            (WeightType::Q8_0, WeightType::Q4_0),
            (WeightType::Q4_0, WeightType::F16),
        ] {
            for (n_rows, n_cols) in [(1, 32), (70, 96), (33, 576), (40, 1024)] {
                let gate = random(&mut rng, gate_ty, n_rows, n_cols);
                let up = random(&mut rng, gate_ty, n_rows, n_cols);
                let down = random(&mut rng, down_ty, n_rows, n_cols);
                let mut planner = Planner::default();
                let alone = planner.matrix(&gate);
                let together = planner.neurons([&gate, &up], Some(&down));
                assert!(
                    planner.n_bytes() < (gate.n_bytes() * 3 + down.n_bytes()) * 51 / 50 + n_rows * 12 + 256
                );
                let filled = fill(planner, 2);
                let [gate_rows, up_rows, down_rows] = [0, 1, 2].map(|i| filled.rows(together[i]));
                let alone = filled.rows(alone);
                for i in 0..n_rows {
                    assert_eq!(down_rows.bytes(i), down.row(i));
                    assert_eq!(alone.bytes(i), gate_rows.bytes(i));
                    match (Planar::of(gate_ty), up_rows.row(i)) {
                        (Some(kind), Row::Planar(_, row)) => {
                            let mut quants = vec![0; kind.quant_bytes(n_cols)];
                            let mut scales = vec![0; n_cols / 32];
                            kind.split(up.row(i), &mut quants, &mut scales);
                            assert_eq!((row.quants, row.scales), (&quants[..], &scales[..]));
                        }
                        (None, _) => assert_eq!(up_rows.bytes(i), up.row(i)),
                        (Some(_), row) => panic!("{row:?}"),
                    }
                }
            }
        }
    }

    #[test]
    fn a_fingerprint_follows_weights_names_and_places() {
        let mut rng = Random::new(3);
        let (a, b) = (random(&mut rng, WeightType::F16, 8, 32), random(&mut rng, WeightType::F16, 8, 32));
        let of = |matrices: &[&WeightMatrix]| {
            let mut planner = Planner::default();
            for matrix in matrices {
                planner.matrix(*matrix);
            }
            planner.fingerprint()
        };
        assert_eq!(of(&[&a, &b]), of(&[&a, &b]));
        assert_ne!(of(&[&a, &b]), of(&[&b, &a]));
        assert_ne!(of(&[&a]), of(&[&a.rows(0..7)]));
        let mut planner = Planner::default();
        planner.neurons([&a], Some(&b));
        assert_ne!(of(&[&a, &b]), planner.fingerprint());
        let mut planner = Planner::default();
        planner.matrix(&a);
        planner.certificate(&Source::from(&a));
        assert_ne!(of(&[&a]), planner.fingerprint());
    }

    #[test]
    fn every_weight_of_a_turned_projection_is_what_it_was() {
        let (n_embd, n_ff) = (48, 96);
        let matrix = random(&mut Random::new(2), WeightType::Q8_0, n_embd, n_ff);
        let mut planner = Planner::default();
        let planned = planner.turned(&matrix);
        assert_eq!(planner.n_bytes(), matrix.n_bytes().next_multiple_of(ALIGN));
        let relaid = fill(planner, 2).relaid(planned);
        let mut row = vec![0.0; n_ff];
        for e in 0..n_embd {
            matrix.decode_row(e, &mut row);
            for (j, &w) in row.iter().enumerate() {
                let (scales, values) = relaid.block(j / relaid::BLOCK);
                let value = f32::from(values[j % relaid::BLOCK * n_embd + e]);
                assert_eq!(half::f16::from_bits(scales[e]).to_f32() * value, w);
            }
        }
    }
}
