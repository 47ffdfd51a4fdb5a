//! What the backend asks of a device: memory, copies in order, launches. The driver is one implementor; tests have
//! another that runs the same kernels on the host.
#![expect(unsafe_code, reason = "kernels take addresses; see docs/unsafe.md")]

use std::marker::PhantomData;
use std::ops::Range;

use powerinfer_sparse_ops::{ActiveMode, BackendError, WeightType};

/// Name in messages and summaries.
pub(crate) const NAME: &str = "cuda";

/// Every piece of memory takes a multiple of this.
pub(crate) const ALIGN: usize = 256;

/// Types of weights that there are kernels for.
pub const TYPES: [WeightType; 7] = [
    WeightType::F32,
    WeightType::F16,
    WeightType::BF16,
    WeightType::Q8_0,
    WeightType::Q4_0,
    WeightType::Q4_K,
    WeightType::Q6_K,
];

macro_rules! names {
    ($(#[$doc:meta])* $name:ident: $($variant:ident = $text:literal),+ $(,)?) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[expect(missing_docs, reason = "the kernels are described in kernels/README.md")]
        pub enum $name { $($variant),+ }

        impl $name {
            const ALL: &'static [(Self, &'static str)] = &[$((Self::$variant, $text)),+];
        }
    };
}

names! {
    /// A kernel that reads no weights of a type.
    Plain:
    RmsNorm = "rms_norm",
    LayerNorm = "layer_norm",
    Rope = "rope",
    KvAppendF16 = "kv_append_f16",
    KvAppendF32 = "kv_append_f32",
    AttentionF16 = "attention_f16",
    AttentionF32 = "attention_f32",
    AttentionMerge = "attention_merge",
    GateCopyQuantize = "gate_copy_quantize",
    GateCopyBits = "gate_copy_bits",
    Compact = "compact",
    DownReduce = "down_reduce",
    CountMarks = "count_marks",
    CountFired = "count_fired",
    AddRows = "add_rows",
    FillU32 = "fill_u32",
}

names! {
    /// A kernel that there is for each of [`TYPES`].
    OfType:
    Embed = "embed",
    Matvec = "matvec",
    MatvecOne = "matvec_one",
    Matmul = "matmul",
    Predict = "predict",
    FfnGateList = "ffn_gate_list",
    FfnList = "ffn_list",
    DownList = "down_list",
    FfnGateTile = "ffn_gate_tile",
    FfnTile = "ffn_tile",
    DownTile = "down_tile",
    FfnMatmul = "ffn_matmul",
    DownMatmul = "down_matmul",
}

/// A kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// One that reads no weights of a type.
    Plain(Plain),
    /// One for weights of a type out of [`TYPES`].
    Typed(OfType, WeightType),
}

/// Place of a type in [`TYPES`].
pub(crate) fn type_index(ty: WeightType) -> Option<usize> {
    TYPES.iter().position(|&t| t == ty)
}

impl Kernel {
    /// Number of kernels.
    pub const COUNT: usize = Plain::ALL.len() + TYPES.len() * OfType::ALL.len();

    /// Number of the kernel, below [`Kernel::COUNT`].
    ///
    /// # Panics
    /// If the type is not one of [`TYPES`].
    pub fn index(self) -> usize {
        match self {
            Self::Plain(kernel) => kernel as usize,
            Self::Typed(kernel, ty) => {
                let ty = type_index(ty).expect("types are compared with the list at load");
                Plain::ALL.len() + ty * OfType::ALL.len() + kernel as usize
            }
        }
    }

    /// The kernels of a module: those of a weight type, or with `None` those without a type.
    pub fn of(ty: Option<WeightType>) -> Vec<Self> {
        match ty {
            None => Plain::ALL.iter().map(|&(kernel, _)| Self::Plain(kernel)).collect(),
            Some(ty) => OfType::ALL.iter().map(|&(kernel, _)| Self::Typed(kernel, ty)).collect(),
        }
    }

    /// Name of its function.
    pub fn name(self) -> String {
        match self {
            Self::Plain(kernel) => Plain::ALL[kernel as usize].1.to_owned(),
            Self::Typed(kernel, ty) => {
                format!("{}_{}", OfType::ALL[kernel as usize].1, ty.name().to_lowercase())
            }
        }
    }
}

/// One argument of a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arg {
    /// An address in the memory of the device; 0 for none.
    Ptr(u64),
    /// `int`.
    I32(i32),
    /// `float`.
    F32(f32),
}

/// Most arguments that a kernel takes.
pub const MAX_ARGS: usize = 24;

/// Memory of a device. Only the account of the backend makes one, so its bytes are there until the device is gone or
/// [`Gpu::free`] took it back (BUFFER-LIVE).
#[derive(Debug)]
pub struct Buffer {
    at: u64,
    n_bytes: usize,
}

/// Where in a [`Buffer`] something lies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) offset: usize,
    pub(crate) n_bytes: usize,
}

/// Sizes of the pieces of a buffer, put one after the other, each at a multiple of 256 bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Plan {
    n_bytes: usize,
}

impl Plan {
    /// Room for `n_bytes`. Sizes beyond what can be addressed stay there, so that no device has room for them.
    pub(crate) fn add(&mut self, n_bytes: usize) -> Piece {
        let piece = Piece { offset: self.n_bytes, n_bytes };
        let rounded = n_bytes.checked_next_multiple_of(ALIGN).unwrap_or(usize::MAX);
        self.n_bytes = self.n_bytes.saturating_add(rounded);
        piece
    }

    pub(crate) fn n_bytes(self) -> usize {
        self.n_bytes
    }
}

/// Bytes of a [`Buffer`].
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    at: u64,
    n_bytes: usize,
    of: PhantomData<&'a Buffer>,
}

impl Buffer {
    /// Address of the first byte.
    pub fn at(&self) -> u64 {
        self.at
    }

    /// Number of bytes.
    pub fn n_bytes(&self) -> usize {
        self.n_bytes
    }

    /// A piece of it.
    ///
    /// # Panics
    /// If it lies outside.
    pub(crate) fn piece(&self, piece: Piece) -> View<'_> {
        View { at: self.at, n_bytes: self.n_bytes, of: PhantomData }.sub(piece.offset, piece.n_bytes)
    }
}

impl View<'_> {
    /// Address of the first byte.
    pub fn at(self) -> u64 {
        self.at
    }

    /// Number of bytes.
    pub fn n_bytes(self) -> usize {
        self.n_bytes
    }

    /// A part of it.
    ///
    /// # Panics
    /// If it lies outside.
    pub(crate) fn sub(self, offset: usize, n_bytes: usize) -> Self {
        let fits = offset <= self.n_bytes && n_bytes <= self.n_bytes - offset;
        assert!(fits, "{n_bytes} bytes at {offset} of {}", self.n_bytes);
        Self { at: self.at + offset as u64, n_bytes, of: PhantomData }
    }

    /// The part from `offset` on.
    ///
    /// # Panics
    /// If it lies outside.
    pub(crate) fn from(self, offset: usize) -> Self {
        let rest = self.n_bytes.checked_sub(offset);
        self.sub(offset, rest.unwrap_or_else(|| panic!("offset {offset} of {} bytes", self.n_bytes)))
    }
}

/// Memory of the host that the device copies from and to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostId(pub usize);

/// Launches that are kept, to be run again together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphId(pub usize);

/// A device. Copies and launches run one after the other in the order of the calls, beside the caller.
pub trait Gpu: Send {
    /// What it is, for people.
    fn description(&self) -> String;

    /// Free bytes and all bytes of its memory.
    fn memory(&self) -> (u64, u64);

    /// A buffer takes a multiple of so many bytes of its memory.
    fn granule(&self) -> u64;

    /// Hands out memory, aligned to 256 bytes, and returns its address.
    ///
    /// # Errors
    /// [`BackendError::OutOfMemory`].
    fn alloc(&mut self, n_bytes: usize) -> Result<u64, BackendError>;

    /// Takes memory back when all work is done.
    fn free(&mut self, buffer: Buffer);

    /// Memory of the host that is pinned, filled with zeros.
    ///
    /// # Errors
    /// [`BackendError::OutOfMemory`].
    fn alloc_host(&mut self, n_bytes: usize) -> Result<HostId, BackendError>;

    /// Takes memory of the host back.
    fn free_host(&mut self, id: HostId);

    /// Bytes of pinned memory, when the last copy from or to it is done.
    fn host(&mut self, id: HostId) -> &mut [u8];

    /// Copies bytes to the device; the caller may change them when it returns.
    fn write(&mut self, to: View<'_>, bytes: &[u8]);

    /// Copies from pinned memory to the device.
    fn upload(&mut self, from: HostId, range: Range<usize>, to: View<'_>);

    /// Copies from the device to pinned memory.
    fn download(&mut self, from: View<'_>, to: HostId, at: usize);

    /// Copies on the device; the two do not overlap.
    fn copy(&mut self, from: View<'_>, to: View<'_>);

    /// Makes the kernels of a type ready, or those without a type.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] if the device does not take them.
    fn load_kernels(&mut self, ty: Option<WeightType>) -> Result<(), BackendError>;

    /// Runs a kernel that was made ready.
    ///
    /// # Safety
    /// LAUNCH-CHECKED: pointers are 0 where the kernel allows it, or lead to as many bytes as the kernel reads and writes under
    /// these arguments, and so do addresses and numbers of rows in tables that they lead to.
    unsafe fn launch(&mut self, kernel: Kernel, grid: [u32; 3], n_threads: u32, args: &[Arg]);

    /// Begins to keep launches instead of running them; until [`Gpu::end_graph`] nothing else is asked for.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] if the device cannot.
    fn begin_graph(&mut self) -> Result<(), BackendError>;

    /// The launches since [`Gpu::begin_graph`].
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] if the device did not keep them; they have not run then.
    fn end_graph(&mut self) -> Result<GraphId, BackendError>;

    /// Runs the launches of a graph in their order.
    ///
    /// # Safety
    /// GRAPH-LIVE: what its launches were given is still there, and LAUNCH-CHECKED is still true of it.
    unsafe fn run_graph(&mut self, id: GraphId);

    /// Forgets a graph when all work is done.
    fn free_graph(&mut self, id: GraphId);

    /// Waits until all work is done.
    fn synchronize(&mut self);
}

/// One argument of a launch, with what the kernel does to it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Param<'a> {
    /// Memory, of which the kernel reads or writes so many bytes.
    Memory(View<'a>, usize),
    /// No memory.
    Absent,
    /// `int`.
    Int(usize),
    /// `float`.
    Float(f32),
}

impl<'a> Param<'a> {
    pub(crate) fn optional(memory: Option<View<'a>>, n_bytes: usize) -> Self {
        memory.map_or(Param::Absent, |view| Param::Memory(view, n_bytes))
    }
}

/// Most graphs that are kept.
const MAX_GRAPHS: usize = 32;

/// What the launches of a graph depend on, beside the memory that they are given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GraphKey {
    /// First layer, and the one after the last.
    pub(crate) layers: (u32, u32),
    pub(crate) mode: ActiveMode,
    pub(crate) n_rows: usize,
    pub(crate) n_spans: usize,
}

/// A [`Gpu`] whose memory is accounted for.
///
/// Graphs are forgotten whenever memory is handed out or taken back, so those that are known have only been given
/// memory that is still there, and were made of what is loaded (GRAPH-LIVE). Caches are excepted: graphs find them in tables
/// that every step writes anew.
pub(crate) struct Device {
    gpu: Box<dyn Gpu>,
    limit: Option<u64>,
    granule: u64,
    used: u64,
    peak: u64,
    /// The buffers in use, each rounded up to the granule.
    taken: u64,
    /// The one that was used longest ago first.
    graphs: Vec<(GraphKey, GraphId)>,
    /// Why there are no graphs.
    no_graphs: Option<String>,
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device").field("limit", &self.limit).field("used", &self.used).finish_non_exhaustive()
    }
}

impl Device {
    pub(crate) fn new(gpu: Box<dyn Gpu>, limit: Option<u64>, no_graphs: Option<String>) -> Self {
        let granule = gpu.granule().max(1);
        // Steps do not allocate.
        let graphs = Vec::with_capacity(MAX_GRAPHS);
        Self { gpu, limit, granule, used: 0, peak: 0, taken: 0, graphs, no_graphs }
    }

    pub(crate) fn gpu(&mut self) -> &mut dyn Gpu {
        self.gpu.as_mut()
    }

    pub(crate) fn description(&self) -> String {
        match &self.no_graphs {
            None => self.gpu.description(),
            Some(reason) => format!("{}, without graphs: {reason}", self.gpu.description()),
        }
    }

    /// The limit, or without one all memory of the device.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.limit.unwrap_or_else(|| self.gpu.memory().1)
    }

    pub(crate) fn used(&self) -> u64 {
        self.used
    }

    pub(crate) fn peak(&self) -> u64 {
        self.peak
    }

    /// What the buffers in use take of the device's memory.
    pub(crate) fn taken(&self) -> u64 {
        self.taken
    }

    /// What a buffer takes of the device's memory.
    fn takes(&self, n_bytes: usize) -> u64 {
        (n_bytes as u64).checked_next_multiple_of(self.granule).unwrap_or(u64::MAX)
    }

    /// A buffer for the pieces of a plan.
    pub(crate) fn alloc(&mut self, plan: Plan, what: &str) -> Result<Buffer, BackendError> {
        self.forget_graphs();
        self.alloc_cache(plan, what)
    }

    /// A buffer that launches find only in the tables of a step.
    pub(crate) fn alloc_cache(&mut self, plan: Plan, what: &str) -> Result<Buffer, BackendError> {
        let n_bytes = plan.n_bytes();
        let takes = self.takes(n_bytes);
        let left = self.limit.map_or(u64::MAX, |limit| limit.saturating_sub(self.taken));
        let error = |have_bytes| BackendError::OutOfMemory {
            backend: NAME.into(),
            what: what.to_owned(),
            need_bytes: takes,
            have_bytes,
        };
        if takes > left {
            return Err(error(left));
        }
        let at = self.gpu.alloc(n_bytes).map_err(|e| match e {
            BackendError::OutOfMemory { have_bytes, .. } => error(have_bytes.min(left)),
            other => other,
        })?;
        self.used += n_bytes as u64;
        self.peak = self.peak.max(self.used);
        self.taken += takes;
        Ok(Buffer { at, n_bytes })
    }

    pub(crate) fn free(&mut self, buffer: Buffer) {
        self.forget_graphs();
        self.free_cache(buffer);
    }

    /// The same for a buffer of [`Device::alloc_cache`].
    pub(crate) fn free_cache(&mut self, buffer: Buffer) {
        self.used -= buffer.n_bytes as u64;
        self.taken -= self.takes(buffer.n_bytes);
        self.gpu.free(buffer);
    }

    fn forget_graphs(&mut self) {
        for (_, id) in self.graphs.drain(..) {
            self.gpu.free_graph(id);
        }
    }

    /// Runs launches that depend on the key, on what is loaded and on nothing else: as a graph, which is made the first time,
    /// or one by one where the device has no graphs.
    pub(crate) fn run_as_graph(&mut self, key: GraphKey, launches: impl Fn(&mut Self)) {
        let known = self.graphs.iter().position(|(of, _)| *of == key);
        // Those that are used go behind those that are not.
        let known = known.map(|at| {
            let graph = self.graphs.remove(at);
            self.graphs.push(graph);
            graph.1
        });
        let graph = match known {
            Some(id) => Ok(id),
            None if self.no_graphs.is_some() => return launches(self),
            None => self.make_graph(key, &launches),
        };
        match graph {
            // SAFETY: GRAPH-LIVE; every change of memory but that of caches forgets all graphs.
            Ok(id) => unsafe { self.gpu.run_graph(id) },
            Err(error) => {
                self.no_graphs = Some(error.to_string());
                launches(self);
            }
        }
    }

    fn make_graph(&mut self, key: GraphKey, launches: &impl Fn(&mut Self)) -> Result<GraphId, BackendError> {
        self.gpu.begin_graph()?;
        launches(self);
        let id = self.gpu.end_graph()?;
        if self.graphs.len() == MAX_GRAPHS {
            let (_, unused) = self.graphs.remove(0);
            self.gpu.free_graph(unused);
        }
        self.graphs.push((key, id));
        Ok(id)
    }

    /// Runs a kernel. Only [`crate::kernels`] calls this: there each kernel has a function that says how many bytes it
    /// reads and writes.
    ///
    /// # Panics
    /// If memory is shorter than the kernel needs, or a number has more than 31 bits.
    pub(crate) fn launch(&mut self, kernel: Kernel, grid: [usize; 3], n_threads: u32, params: &[Param<'_>]) {
        if grid.contains(&0) {
            return;
        }
        let mut args = [Arg::Ptr(0); MAX_ARGS];
        for (ix, (arg, param)) in args.iter_mut().zip(params).enumerate() {
            *arg = match *param {
                Param::Memory(view, n_bytes) => {
                    let have = view.n_bytes();
                    assert!(n_bytes <= have, "{kernel:?}: argument {ix} needs {n_bytes} bytes, got {have}");
                    Arg::Ptr(view.at())
                }
                Param::Absent => Arg::Ptr(0),
                Param::Int(v) => Arg::I32(i32::try_from(v).expect("dimensions have 31 bits")),
                Param::Float(v) => Arg::F32(v),
            };
        }
        let grid = grid.map(|n| u32::try_from(n).expect("grids have 32 bits"));
        // SAFETY: LAUNCH-CHECKED. Views are of live buffers (BUFFER-LIVE), and have just been found as long as the callers in
        // `kernels.rs` say; tables are written by kernels, at load, or by `CudaBackend::begin` (TABLES-CHECKED).
        unsafe { self.gpu.launch(kernel, grid, n_threads, &args[..params.len()]) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_has_a_number_of_its_own() {
        let modules = std::iter::once(None).chain(TYPES.map(Some));
        let all: Vec<Kernel> = modules.flat_map(Kernel::of).collect();
        let numbers: Vec<usize> = all.iter().map(|k| k.index()).collect();
        assert_eq!(numbers, (0..Kernel::COUNT).collect::<Vec<_>>());
        assert_eq!(Kernel::Typed(OfType::DownTile, WeightType::Q4_K).name(), "down_tile_q4_k");
    }

    #[test]
    fn pieces_of_a_plan_are_rounded_up_and_sizes_do_not_wrap() {
        let mut plan = Plan::default();
        assert_eq!(plan.add(1), Piece { offset: 0, n_bytes: 1 });
        assert_eq!(plan.add(256), Piece { offset: 256, n_bytes: 256 });
        assert_eq!(plan.add(0).offset, 512);
        assert_eq!(plan.n_bytes(), 512);
        plan.add(usize::MAX);
        assert_eq!(plan.n_bytes(), usize::MAX);
    }
}
