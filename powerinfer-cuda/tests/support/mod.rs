//! The kernels on the host, behind the interface of the backend.
#![allow(dead_code, reason = "not every test file uses everything")]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use powerinfer_cuda::gpu::{Arg, Buffer, Gpu, GraphId, HostId, Kernel, TYPES, View};
use powerinfer_cuda::{CudaBackend, CudaKvType, CudaOptions};
use powerinfer_cuda_emulator as emulator;
use powerinfer_sparse_ops::{BackendError, ModelSpec, WeightType};
use powerinfer_testing::alloc_guard::measure;

/// Whether the kernels can run here. Where they cannot, tests say so and end, unless that is forbidden.
pub(crate) fn is_emulated() -> bool {
    let required = std::env::var_os("POWERINFER_REQUIRE_EMULATOR").is_some_and(|v| v == "1");
    assert!(emulator::available() || !required, "the emulator is required and was not built");
    if !emulator::available() {
        say_not_run();
    }
    emulator::available()
}

#[expect(clippy::print_stderr, reason = "a test that does not run says so")]
fn say_not_run() {
    eprintln!("not run: the kernels are not emulated on this machine");
}

/// Bytes of the emulated device.
const MEMORY_BYTES: u64 = 1 << 30;

/// A device in host memory.
pub(crate) struct EmulatedGpu {
    memory: emulator::Memory,
    host: Vec<Vec<u8>>,
    names: Vec<String>,
    seed: u64,
    granule: u64,
    /// Work that is not done yet, where the device is late.
    queue: Vec<Work>,
    is_late: bool,
    /// Launches that are being kept.
    recording: Option<Vec<Work>>,
    graphs: Vec<Option<Vec<Work>>>,
    refuses_graphs: bool,
    /// Graphs made, run and forgotten.
    pub(crate) n_graphs: Arc<[AtomicU64; 3]>,
    /// Heap allocations that are the emulator's.
    own_allocs: Arc<AtomicU64>,
}

#[derive(Clone)]
enum Work {
    Upload(HostId, Range<usize>, u64),
    Download(u64, usize, HostId, usize),
    Copy(u64, usize, u64),
    Launch(String, [u32; 3], u32, Vec<emulator::Arg>),
}

impl EmulatedGpu {
    /// A device whose threads run in the order that `seed` gives; a late one works only when somebody waits.
    pub(crate) fn new(seed: u64, is_late: bool, own_allocs: Arc<AtomicU64>) -> Self {
        let modules = std::iter::once(None).chain(TYPES.map(Some));
        let names = modules.flat_map(Kernel::of).map(Kernel::name).collect();
        let memory = emulator::Memory::new(MEMORY_BYTES);
        Self {
            memory,
            host: Vec::new(),
            names,
            seed,
            granule: 256,
            queue: Vec::new(),
            is_late,
            recording: None,
            graphs: Vec::new(),
            refuses_graphs: false,
            n_graphs: Arc::default(),
            own_allocs,
        }
    }

    /// A device that hands out memory in multiples of so many bytes.
    pub(crate) fn with_granule(self, granule: u64) -> Self {
        Self { granule, ..self }
    }

    /// A device that keeps no launches.
    pub(crate) fn without_graphs(self) -> Self {
        Self { refuses_graphs: true, ..self }
    }

    fn work(&mut self, work: Work) {
        if let Some(recording) = &mut self.recording {
            assert!(matches!(work, Work::Launch(..)), "a graph has launches only");
            recording.push(work);
        } else if self.is_late {
            self.queue.push(work);
        } else {
            self.run(work);
        }
    }

    #[expect(unsafe_code, reason = "kernels take addresses")]
    fn run(&mut self, work: Work) {
        match work {
            Work::Upload(from, range, to) => self.memory.write(to, &self.host[from.0][range]).unwrap(),
            Work::Download(from, n, to, at) => {
                self.memory.read(from, &mut self.host[to.0][at..at + n]).unwrap();
            }
            Work::Copy(from, n, to) => {
                let mut bytes = vec![0; n];
                self.memory.read(from, &mut bytes).unwrap();
                self.memory.write(to, &bytes).unwrap();
            }
            Work::Launch(name, grid, n_threads, args) => {
                self.seed = self.seed.wrapping_mul(6364136223846793005).wrapping_add(1);
                // SAFETY: KERNEL-ADDRESSES; the backend has checked what it launches with (LAUNCH-CHECKED).
                unsafe { emulator::launch(&name, grid, [n_threads, 1, 1], 0, &args, self.seed) }.unwrap();
            }
        }
    }

    fn catch_up(&mut self) {
        assert!(self.recording.is_none(), "nothing but launches until the end of the graph");
        for work in std::mem::take(&mut self.queue) {
            self.run(work);
        }
    }

    /// Does not count what the emulator allocates.
    fn apart<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        let (result, stats) = measure(|| work(self));
        // `measure` itself allocates once, to see that it can count.
        self.own_allocs.fetch_add(stats.n_allocs + 1, Ordering::SeqCst);
        result
    }
}

impl Gpu for EmulatedGpu {
    fn description(&self) -> String {
        "emulated on the host".into()
    }

    fn memory(&self) -> (u64, u64) {
        (MEMORY_BYTES - self.memory.used_bytes(), MEMORY_BYTES)
    }

    fn granule(&self) -> u64 {
        self.granule
    }

    fn alloc(&mut self, n_bytes: usize) -> Result<u64, BackendError> {
        self.memory.alloc(n_bytes).map_err(|_| BackendError::OutOfMemory {
            backend: "emulator".into(),
            what: "a buffer".into(),
            need_bytes: n_bytes as u64,
            have_bytes: self.memory().0,
        })
    }

    fn free(&mut self, buffer: Buffer) {
        self.catch_up();
        self.memory.free(buffer.at()).unwrap();
    }

    fn alloc_host(&mut self, n_bytes: usize) -> Result<HostId, BackendError> {
        self.host.push(vec![0; n_bytes]);
        Ok(HostId(self.host.len() - 1))
    }

    fn free_host(&mut self, id: HostId) {
        self.catch_up();
        self.host[id.0] = Vec::new();
    }

    fn host(&mut self, id: HostId) -> &mut [u8] {
        self.apart(|gpu| {
            gpu.catch_up();
            gpu.memory.check_guards().unwrap();
        });
        &mut self.host[id.0]
    }

    fn write(&mut self, to: View<'_>, bytes: &[u8]) {
        self.catch_up();
        assert_eq!(to.n_bytes(), bytes.len());
        self.memory.write(to.at(), bytes).unwrap();
    }

    fn upload(&mut self, from: HostId, range: Range<usize>, to: View<'_>) {
        assert_eq!(to.n_bytes(), range.len());
        self.apart(|gpu| gpu.work(Work::Upload(from, range, to.at())));
    }

    fn download(&mut self, from: View<'_>, to: HostId, at: usize) {
        self.apart(|gpu| gpu.work(Work::Download(from.at(), from.n_bytes(), to, at)));
    }

    fn copy(&mut self, from: View<'_>, to: View<'_>) {
        assert_eq!(to.n_bytes(), from.n_bytes());
        self.apart(|gpu| gpu.work(Work::Copy(from.at(), from.n_bytes(), to.at())));
    }

    fn load_kernels(&mut self, _: Option<WeightType>) -> Result<(), BackendError> {
        Ok(())
    }

    #[expect(unsafe_code, reason = "an unsafe function of the trait")]
    unsafe fn launch(&mut self, kernel: Kernel, grid: [u32; 3], n_threads: u32, args: &[Arg]) {
        self.apart(|gpu| {
            let args = args.iter().map(|arg| match *arg {
                Arg::Ptr(at) => emulator::Arg::Ptr(at),
                Arg::I32(v) => emulator::Arg::I32(v),
                Arg::F32(v) => emulator::Arg::F32(v),
            });
            let name = gpu.names[kernel.index()].clone();
            gpu.work(Work::Launch(name, grid, n_threads, args.collect()));
        });
    }

    fn begin_graph(&mut self) -> Result<(), BackendError> {
        if self.refuses_graphs {
            return Err(BackendError::Unavailable {
                backend: "emulator".into(),
                reason: "it was told so".into(),
            });
        }
        assert!(self.recording.replace(Vec::new()).is_none(), "one graph at a time");
        Ok(())
    }

    fn end_graph(&mut self) -> Result<GraphId, BackendError> {
        self.n_graphs[0].fetch_add(1, Ordering::SeqCst);
        self.apart(|gpu| {
            let recorded = gpu.recording.take().expect("a graph was begun");
            assert!(!recorded.is_empty());
            gpu.graphs.push(Some(recorded));
            Ok(GraphId(gpu.graphs.len() - 1))
        })
    }

    #[expect(unsafe_code, reason = "an unsafe function of the trait")]
    unsafe fn run_graph(&mut self, id: GraphId) {
        self.n_graphs[1].fetch_add(1, Ordering::SeqCst);
        self.apart(|gpu| {
            assert!(gpu.recording.is_none());
            for work in gpu.graphs[id.0].clone().expect("the graph is known") {
                gpu.work(work);
            }
        });
    }

    fn free_graph(&mut self, id: GraphId) {
        self.n_graphs[2].fetch_add(1, Ordering::SeqCst);
        self.apart(Self::catch_up);
        self.graphs[id.0].take().expect("a graph is forgotten once");
    }

    fn synchronize(&mut self) {
        self.catch_up();
    }
}

/// A backend on an emulated device.
pub(crate) fn backend(spec: &Arc<ModelSpec>, kv_type: CudaKvType) -> CudaBackend {
    backend_with(spec, kv_type, EmulatedGpu::new(1, false, Arc::default()), None).unwrap()
}

/// The same with a device and a limit of one's own.
pub(crate) fn backend_with(
    spec: &Arc<ModelSpec>,
    kv_type: CudaKvType,
    gpu: EmulatedGpu,
    memory_limit: Option<u64>,
) -> Result<CudaBackend, BackendError> {
    let options = CudaOptions { memory_limit, kv_type, ..CudaOptions::default() };
    CudaBackend::with_gpu(Arc::clone(spec), Box::new(gpu), options)
}
