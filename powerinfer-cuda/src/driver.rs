//! NVIDIA's driver, found when it is asked for. Nothing of CUDA is needed to build or to start a program with this crate.
#![expect(unsafe_code, reason = "the driver is a C library; see docs/unsafe.md")]

use std::ffi::{CString, c_void};
use std::ops::Range;

use cudarc::driver::DriverError;
use cudarc::driver::result;
use cudarc::driver::sys;
use powerinfer_sparse_ops::{BackendError, WeightType};

use crate::gpu::{Arg, Buffer, Gpu, GraphId, HostId, Kernel, MAX_ARGS, NAME, View, type_index};

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Number of the device, as in [`crate::CudaOptions::device`].
    pub device: usize,
    /// Name of the product.
    pub name: String,
    /// Compute capability, major and minor.
    pub compute_capability: (u32, u32),
    /// Bytes of memory that nobody uses.
    pub free_bytes: u64,
    /// Bytes of memory.
    pub total_bytes: u64,
}

/// Oldest compute capability for which there are kernels.
const MIN_CAPABILITY: (u32, u32) = (6, 1);

/// Oldest driver that reads the kernels (PTX 8.0): CUDA 12.0, R525.
const MIN_DRIVER: i32 = 12000;

/// Room for graphs that is there from the start, so that steps do not allocate.
const N_GRAPHS: usize = 64;

/// Writes from so many bytes on go through pinned memory, which the device copies from while the host goes on.
const STAGED_BYTES: usize = 256 << 10;

/// Bytes of pinned memory of which a write has two pieces.
const STAGE_BYTES: usize = 4 << 20;

/// Memory comes from the driver in pages of this size; only small buffers share one.
const GRANULE: u64 = 2 << 20;

fn unavailable(reason: impl Into<String>) -> BackendError {
    BackendError::Unavailable { backend: NAME.into(), reason: reason.into() }
}

fn failed(call: &str) -> impl Fn(DriverError) -> BackendError {
    move |error| unavailable(format!("{call} failed: {error:?}"))
}

/// Functions of the driver that this file calls, most of them through cudarc, where the first call of one that is not there
/// is a panic.
const NEEDED: [&str; 30] = [
    "cuCtxSetCurrent",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventSynchronize",
    // The texts of errors.
    "cuGetErrorName",
    "cuGetErrorString",
    "cuInit",
    "cuLaunchKernel",
    "cuMemAlloc_v2",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
];

/// Functions without which launches are not kept in graphs.
const GRAPH_FUNCTIONS: [&str; 6] = [
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuStreamBeginCapture_v2",
    "cuStreamEndCapture",
];

/// Fails with the name of the first function that is not there.
fn check_functions(names: &[&str]) -> Result<(), BackendError> {
    match names.iter().find(|name| !has_function(name)) {
        Some(name) => Err(unavailable(format!("the NVIDIA driver has no function `{name}`"))),
        None => Ok(()),
    }
}

/// The driver's library has a function of this name.
fn has_function(name: &str) -> bool {
    // SAFETY: DRIVER-PRESENT; the library has been found before.
    let library = unsafe { sys::culib() };
    // SAFETY: DRIVER-PRESENT; the function is only looked up.
    unsafe { library.get::<unsafe extern "C" fn()>(name.as_bytes()) }.is_ok()
}

/// Finds the driver and its functions, and starts it; returns the number of devices.
fn start() -> Result<usize, BackendError> {
    // SAFETY: DRIVER-PRESENT; asking whether a library of that name loads runs nothing but its own initialisation.
    if !unsafe { sys::is_culib_present() } {
        return Err(unavailable("there is no NVIDIA driver (no libcuda)"));
    }
    check_functions(&NEEDED)?;
    let mut version = 0;
    // SAFETY: DRIVER-PRESENT; the argument is a place for an int.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }.result().map_err(failed("cuDriverGetVersion"))?;
    if version < MIN_DRIVER {
        let found = format!("{}.{}", version / 1000, version % 1000 / 10);
        return Err(unavailable(format!("the NVIDIA driver is for CUDA {found}, 12.0 (R525) is needed")));
    }
    result::init().map_err(failed("cuInit"))?;
    match result::device::get_count().map_err(failed("cuDeviceGetCount"))? {
        n @ 1.. => Ok(n as usize),
        _ => Err(unavailable("there is no CUDA device")),
    }
}

/// The devices of this machine that can be used, in the order of their numbers.
///
/// # Errors
/// [`BackendError::Unavailable`] if there is no driver, it is too old or lacks a function, or there is no device; if none of
/// the devices can be used, the reason of the first.
pub fn devices() -> Result<Vec<DeviceInfo>, BackendError> {
    usable(probe_devices()?)
}

/// Every device of this machine, by its number, or why it cannot be used.
///
/// # Errors
/// [`BackendError::Unavailable`] if there is no driver, it is too old or lacks a function, or there is no device.
pub fn probe_devices() -> Result<Vec<Result<DeviceInfo, BackendError>>, BackendError> {
    let n = start()?;
    Ok((0..n).map(|device| Driver::open(device).map(|driver| driver.info())).collect())
}

/// Those that can be used, or the first reason why none can.
fn usable(probed: Vec<Result<DeviceInfo, BackendError>>) -> Result<Vec<DeviceInfo>, BackendError> {
    let mut reason = None;
    let keep = |device: Result<DeviceInfo, BackendError>| match device {
        Ok(device) => Some(device),
        Err(error) => {
            reason.get_or_insert(error);
            None
        }
    };
    let devices: Vec<DeviceInfo> = probed.into_iter().filter_map(keep).collect();
    match reason {
        Some(error) if devices.is_empty() => Err(error),
        _ => Ok(devices),
    }
}

/// Opens a device.
///
/// # Errors
/// [`BackendError::Unavailable`] if there is no driver, no such device, or one of them is too old.
pub(crate) fn open(device: usize) -> Result<Box<dyn Gpu>, BackendError> {
    let n = start()?;
    if device >= n {
        return Err(unavailable(format!("there is no CUDA device {device}, the machine has {n}")));
    }
    Ok(Box::new(Driver::open(device)?))
}

/// A device with a stream of its own. All handles and addresses are of this context and live until `drop` (DRIVER-HANDLES).
struct Driver {
    ordinal: usize,
    name: String,
    capability: (u32, u32),
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    modules: Vec<sys::CUmodule>,
    functions: [sys::CUfunction; Kernel::COUNT],
    buffers: Vec<u64>,
    pinned: Vec<Option<Pinned>>,
    graphs: Vec<Option<sys::CUgraphExec>>,
    /// Whether the driver has what they need; looked up once, since steps do not allocate.
    has_graphs: Result<(), BackendError>,
    /// Pinned memory that large writes go through, once there was one: a half is filled while the other is copied.
    stages: Option<[HostId; 2]>,
    next_stage: usize,
}

/// Memory of the host; the event is recorded behind each copy, and whoever wants the bytes waits for it (PINNED-IDLE).
struct Pinned {
    at: *mut u8,
    n_bytes: usize,
    event: sys::CUevent,
    is_in_flight: bool,
}

// SAFETY: DRIVER-HANDLES; the driver takes its handles from any thread, and `enter` makes the context that of the thread.
unsafe impl Send for Driver {}

/// Stops where the device failed: steps do not return errors.
fn must<T>(result: Result<T, DriverError>, call: &str) -> T {
    result.unwrap_or_else(|error| panic!("the CUDA device failed in {call}: {error:?}"))
}

impl Driver {
    fn open(ordinal: usize) -> Result<Self, BackendError> {
        let device = result::device::get(ordinal as i32).map_err(failed("cuDeviceGet"))?;
        let attribute = |attribute| {
            // SAFETY: DRIVER-HANDLES; the device has just been found.
            unsafe { result::device::get_attribute(device, attribute) }
                .map(i32::cast_unsigned)
                .map_err(failed("cuDeviceGetAttribute"))
        };
        use sys::CUdevice_attribute as Attribute;
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let name = result::device::get_name(device).map_err(failed("cuDeviceGetName"))?;
        let (found, least) = ((major, minor), MIN_CAPABILITY);
        if found < least {
            return Err(unavailable(format!(
                "{name} has compute capability {}.{}, {}.{} is needed",
                found.0, found.1, least.0, least.1
            )));
        }
        // SAFETY: DRIVER-HANDLES; the device has just been found.
        let context =
            unsafe { result::primary_ctx::retain(device) }.map_err(failed("cuDevicePrimaryCtxRetain"))?;
        let mut driver = Self {
            ordinal,
            name,
            capability: (major, minor),
            device,
            context,
            stream: std::ptr::null_mut(),
            modules: Vec::new(),
            functions: [std::ptr::null_mut(); Kernel::COUNT],
            buffers: Vec::new(),
            pinned: Vec::new(),
            graphs: Vec::with_capacity(N_GRAPHS),
            has_graphs: check_functions(&GRAPH_FUNCTIONS),
            stages: None,
            next_stage: 0,
        };
        driver.try_enter()?;
        driver.stream = result::stream::create(result::stream::StreamKind::NonBlocking)
            .map_err(failed("cuStreamCreate"))?;
        Ok(driver)
    }

    fn info(&self) -> DeviceInfo {
        let (free_bytes, total_bytes) = self.memory();
        DeviceInfo {
            device: self.ordinal,
            name: self.name.clone(),
            compute_capability: self.capability,
            free_bytes,
            total_bytes,
        }
    }

    /// Makes the context that of this thread.
    fn try_enter(&self) -> Result<(), BackendError> {
        // SAFETY: DRIVER-HANDLES.
        unsafe { result::ctx::set_current(self.context) }.map_err(failed("cuCtxSetCurrent"))
    }

    /// The same in a step.
    fn enter(&self) {
        self.try_enter().unwrap_or_else(|error| panic!("{error}"));
    }

    fn pinned(&mut self, id: HostId) -> &mut Pinned {
        self.pinned[id.0].as_mut().expect("pinned memory is in use")
    }

    /// Notes a copy from or to pinned memory.
    fn note_copy(&mut self, id: HostId) {
        let stream = self.stream;
        let pinned = self.pinned(id);
        pinned.is_in_flight = true;
        // SAFETY: DRIVER-HANDLES.
        must(unsafe { result::event::record(pinned.event, stream) }, "cuEventRecord");
    }

    /// Pinned memory for large writes, if there is any.
    fn stages(&mut self) -> Option<[HostId; 2]> {
        if self.stages.is_none() {
            let first = self.alloc_host(STAGE_BYTES).ok()?;
            match self.alloc_host(STAGE_BYTES) {
                Ok(second) => self.stages = Some([first, second]),
                Err(_) => self.free_host(first),
            }
        }
        self.stages
    }

    /// Bytes of pinned memory, whether or not a copy is under way.
    fn bytes(&mut self, id: HostId) -> *mut [u8] {
        let pinned = self.pinned(id);
        std::ptr::slice_from_raw_parts_mut(pinned.at, pinned.n_bytes)
    }
}

fn ptx(ty: Option<WeightType>, is_ampere: bool) -> &'static str {
    macro_rules! of {
        ($name:literal) => {
            if is_ampere {
                include_str!(concat!("../ptx/", $name, "_80.ptx"))
            } else {
                include_str!(concat!("../ptx/", $name, "_61.ptx"))
            }
        };
    }
    match ty {
        None => of!("base"),
        Some(WeightType::F32) => of!("f32"),
        Some(WeightType::F16) => of!("f16"),
        Some(WeightType::BF16) => of!("bf16"),
        Some(WeightType::Q8_0) => of!("q8_0"),
        Some(WeightType::Q4_0) => of!("q4_0"),
        Some(WeightType::Q4_K) => of!("q4_k"),
        Some(WeightType::Q6_K) => of!("q6_k"),
        Some(other) => unreachable!("{other} is not one of `TYPES`"),
    }
}

impl Driver {
    /// Brings in the module with the kernels of a type, or those of none.
    fn load_module(&mut self, ty: Option<WeightType>) -> Result<(), BackendError> {
        let kernels = Kernel::of(ty);
        if !self.functions[kernels[0].index()].is_null() {
            return Ok(());
        }
        debug_assert!(ty.is_none_or(|ty| type_index(ty).is_some()));
        self.try_enter()?;
        let text = CString::new(ptx(ty, self.capability >= (8, 0)))
            .map_err(|_| unavailable("the kernels have a zero in their text"))?;
        // SAFETY: DRIVER-HANDLES; the image is a text that ends with zero.
        let module = unsafe { result::module::load_data(text.as_ptr().cast()) }
            .map_err(failed("cuModuleLoadData of the kernels"))?;
        self.modules.push(module);
        for kernel in kernels {
            let name = kernel.name();
            let name = CString::new(name).map_err(|_| unavailable("a kernel's name has a zero"))?;
            // SAFETY: DRIVER-HANDLES; the module has just been loaded.
            self.functions[kernel.index()] = unsafe { result::module::get_function(module, name) }
                .map_err(|error| unavailable(format!("no kernel `{}`: {error:?}", kernel.name())))?;
        }
        Ok(())
    }
}

impl Gpu for Driver {
    fn description(&self) -> String {
        let (major, minor) = self.capability;
        format!("{}, compute capability {major}.{minor}", self.name)
    }

    fn memory(&self) -> (u64, u64) {
        let info = self.try_enter().ok().and_then(|()| result::mem_get_info().ok());
        info.map_or((0, 0), |(free, total)| (free as u64, total as u64))
    }

    fn granule(&self) -> u64 {
        GRANULE
    }

    fn alloc(&mut self, n_bytes: usize) -> Result<u64, BackendError> {
        self.try_enter()?;
        // SAFETY: DRIVER-HANDLES; the memory is not read before it is written.
        let at = unsafe { result::malloc_sync(n_bytes.max(1)) }.map_err(|error| match error.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => BackendError::OutOfMemory {
                backend: NAME.into(),
                what: "a buffer".into(),
                need_bytes: n_bytes as u64,
                have_bytes: self.memory().0,
            },
            _ => failed("cuMemAlloc")(error),
        })?;
        self.buffers.push(at);
        Ok(at)
    }

    fn free(&mut self, buffer: Buffer) {
        self.synchronize();
        self.buffers.retain(|&at| at != buffer.at());
        // SAFETY: DRIVER-HANDLES; the buffer is given up, and no work is left that could use it.
        must(unsafe { result::free_sync(buffer.at()) }, "cuMemFree");
    }

    fn alloc_host(&mut self, n_bytes: usize) -> Result<HostId, BackendError> {
        self.try_enter()?;
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
            .map_err(failed("cuEventCreate"))?;
        // SAFETY: DRIVER-HANDLES; the memory is filled below.
        let at = unsafe { result::malloc_host(n_bytes.max(1), 0) }.map_err(|error| {
            // SAFETY: DRIVER-HANDLES; nobody else knows of the event.
            let _ = unsafe { result::event::destroy(event) };
            match error.0 {
                sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => BackendError::OutOfMemory {
                    backend: NAME.into(),
                    what: "pinned memory of the host".into(),
                    need_bytes: n_bytes as u64,
                    have_bytes: 0,
                },
                _ => failed("cuMemHostAlloc")(error),
            }
        })?;
        let at = at.cast::<u8>();
        // SAFETY: DRIVER-HANDLES; as many bytes have just been handed out.
        unsafe { at.write_bytes(0, n_bytes) };
        self.pinned.push(Some(Pinned { at, n_bytes, event, is_in_flight: false }));
        Ok(HostId(self.pinned.len() - 1))
    }

    fn free_host(&mut self, id: HostId) {
        self.synchronize();
        if let Some(pinned) = self.pinned[id.0].take() {
            // SAFETY: DRIVER-HANDLES; no work is left that could use it.
            let _ = unsafe { result::event::destroy(pinned.event) };
            // SAFETY: DRIVER-HANDLES; no work is left that could use it, and no slice of it lives.
            must(unsafe { result::free_host(pinned.at.cast()) }, "cuMemFreeHost");
        }
    }

    fn host(&mut self, id: HostId) -> &mut [u8] {
        self.enter();
        let pinned = self.pinned(id);
        if std::mem::take(&mut pinned.is_in_flight) {
            // SAFETY: DRIVER-HANDLES.
            must(unsafe { result::event::synchronize(pinned.event) }, "cuEventSynchronize");
        }
        let bytes = self.bytes(id);
        // SAFETY: PINNED-IDLE; every copy from or to these bytes is done, and they cannot be copied while the slice lives.
        unsafe { &mut *bytes }
    }

    fn write(&mut self, to: View<'_>, bytes: &[u8]) {
        assert_eq!(to.n_bytes(), bytes.len(), "bytes written to the device");
        if bytes.is_empty() {
            return;
        }
        if bytes.len() >= STAGED_BYTES
            && let Some(stages) = self.stages()
        {
            let mut offset = 0;
            for chunk in bytes.chunks(STAGE_BYTES) {
                // Waits for the copy before the last.
                self.next_stage ^= 1;
                let stage = stages[self.next_stage];
                self.host(stage)[..chunk.len()].copy_from_slice(chunk);
                self.upload(stage, 0..chunk.len(), to.sub(offset, chunk.len()));
                offset += chunk.len();
            }
            return;
        }
        self.enter();
        // SAFETY: BUFFER-LIVE; the view is as long as the bytes, which stay until the wait below is over.
        must(unsafe { result::memcpy_htod_async(to.at(), bytes, self.stream) }, "cuMemcpyHtoDAsync");
        self.synchronize();
    }

    fn upload(&mut self, from: HostId, range: Range<usize>, to: View<'_>) {
        assert_eq!(to.n_bytes(), range.len(), "bytes copied to the device");
        if range.is_empty() {
            return;
        }
        self.enter();
        let pinned = self.pinned(from);
        assert!(range.end <= pinned.n_bytes, "{range:?} of {} pinned bytes", pinned.n_bytes);
        let at = pinned.at.wrapping_add(range.start);
        // SAFETY: PINNED-IDLE; the range is in pinned memory, which nobody writes before `host` has waited for the copy.
        let bytes = unsafe { std::slice::from_raw_parts(at, range.len()) };
        // SAFETY: BUFFER-LIVE; the view is as long as the bytes.
        must(unsafe { result::memcpy_htod_async(to.at(), bytes, self.stream) }, "cuMemcpyHtoDAsync");
        self.note_copy(from);
    }

    fn download(&mut self, from: View<'_>, to: HostId, at: usize) {
        if from.n_bytes() == 0 {
            return;
        }
        self.enter();
        let pinned = self.pinned(to);
        let fits = at <= pinned.n_bytes && from.n_bytes() <= pinned.n_bytes - at;
        assert!(fits, "{} bytes at {at} of {} pinned bytes", from.n_bytes(), pinned.n_bytes);
        let first: *mut c_void = pinned.at.wrapping_add(at).cast();
        // SAFETY: BUFFER-LIVE and PINNED-IDLE; both are as long, and nobody reads before `host` has waited for the copy.
        let copied = unsafe { sys::cuMemcpyDtoHAsync_v2(first, from.at(), from.n_bytes(), self.stream) };
        must(copied.result(), "cuMemcpyDtoHAsync");
        self.note_copy(to);
    }

    fn copy(&mut self, from: View<'_>, to: View<'_>) {
        assert_eq!(to.n_bytes(), from.n_bytes(), "bytes copied on the device");
        if from.n_bytes() == 0 {
            return;
        }
        self.enter();
        // SAFETY: BUFFER-LIVE; both are as long.
        let copied = unsafe { result::memcpy_dtod_async(to.at(), from.at(), from.n_bytes(), self.stream) };
        must(copied, "cuMemcpyDtoDAsync");
    }

    fn load_kernels(&mut self, ty: Option<WeightType>) -> Result<(), BackendError> {
        self.load_module(ty)
    }

    unsafe fn launch(&mut self, kernel: Kernel, grid: [u32; 3], n_threads: u32, args: &[Arg]) {
        let function = self.functions[kernel.index()];
        assert!(!function.is_null(), "{kernel:?} was not made ready");
        self.enter();
        let mut slots = [0u64; MAX_ARGS];
        let mut params = [std::ptr::null_mut::<c_void>(); MAX_ARGS];
        for ((slot, param), arg) in slots.iter_mut().zip(&mut params).zip(args) {
            // The driver reads the first 4 or 8 bytes; its hosts are little-endian.
            *slot = match *arg {
                Arg::Ptr(at) => at,
                Arg::I32(v) => u64::from(v.cast_unsigned()),
                Arg::F32(v) => u64::from(v.to_bits()),
            };
            *param = (&raw mut *slot).cast();
        }
        let params = &mut params[..args.len()];
        let [x, y, z] = grid;
        // SAFETY: LAUNCH-CHECKED, which the caller upholds; the slots live until the call has copied them.
        let launched =
            unsafe { result::launch_kernel(function, (x, y, z), (n_threads, 1, 1), 0, self.stream, params) };
        launched.unwrap_or_else(|error| panic!("the CUDA device failed to launch {kernel:?}: {error:?}"));
    }

    fn begin_graph(&mut self) -> Result<(), BackendError> {
        self.has_graphs.clone()?;
        self.try_enter()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: DRIVER-HANDLES.
        unsafe { result::stream::begin_capture(self.stream, mode) }.map_err(failed("cuStreamBeginCapture"))
    }

    fn end_graph(&mut self) -> Result<GraphId, BackendError> {
        self.try_enter()?;
        // SAFETY: DRIVER-HANDLES.
        let graph =
            unsafe { result::stream::end_capture(self.stream) }.map_err(failed("cuStreamEndCapture"))?;
        let flags = sys::CUgraphInstantiate_flags(0);
        // SAFETY: DRIVER-HANDLES; the graph has just been made.
        let exec = unsafe { result::graph::instantiate(graph, flags) };
        // SAFETY: DRIVER-HANDLES; what can be run has a copy of its own.
        let _ = unsafe { result::graph::destroy(graph) };
        let exec = exec.map_err(failed("cuGraphInstantiate"))?;
        let free = self.graphs.iter().position(Option::is_none);
        let at = free.unwrap_or_else(|| {
            self.graphs.push(None);
            self.graphs.len() - 1
        });
        self.graphs[at] = Some(exec);
        Ok(GraphId(at))
    }

    unsafe fn run_graph(&mut self, id: GraphId) {
        self.enter();
        let exec = self.graphs[id.0].expect("the graph is known");
        // SAFETY: GRAPH-LIVE, which the caller upholds, and DRIVER-HANDLES.
        must(unsafe { result::graph::launch(exec, self.stream) }, "cuGraphLaunch");
    }

    fn free_graph(&mut self, id: GraphId) {
        self.synchronize();
        if let Some(exec) = self.graphs[id.0].take() {
            // SAFETY: DRIVER-HANDLES; it does not run any more.
            must(unsafe { result::graph::exec_destroy(exec) }, "cuGraphExecDestroy");
        }
    }

    fn synchronize(&mut self) {
        self.enter();
        // SAFETY: DRIVER-HANDLES.
        must(unsafe { result::stream::synchronize(self.stream) }, "cuStreamSynchronize");
    }
}

impl Drop for Driver {
    /// Gives everything back; errors are of no use here.
    fn drop(&mut self) {
        // SAFETY: DRIVER-HANDLES.
        let _ = unsafe { result::ctx::set_current(self.context) };
        if !self.stream.is_null() {
            // SAFETY: DRIVER-HANDLES.
            let _ = unsafe { result::stream::synchronize(self.stream) };
            // SAFETY: DRIVER-HANDLES; nothing is queued any more.
            let _ = unsafe { result::stream::destroy(self.stream) };
        }
        for exec in self.graphs.drain(..).flatten() {
            // SAFETY: DRIVER-HANDLES; its stream is gone.
            let _ = unsafe { result::graph::exec_destroy(exec) };
        }
        for pinned in self.pinned.drain(..).flatten() {
            // SAFETY: DRIVER-HANDLES; its stream is gone.
            let _ = unsafe { result::event::destroy(pinned.event) };
            // SAFETY: DRIVER-HANDLES; nobody can reach the memory any more.
            let _ = unsafe { result::free_host(pinned.at.cast()) };
        }
        for at in self.buffers.drain(..) {
            // SAFETY: DRIVER-HANDLES; nobody can reach the memory any more.
            let _ = unsafe { result::free_sync(at) };
        }
        for module in self.modules.drain(..) {
            // SAFETY: DRIVER-HANDLES; its functions are not called any more.
            let _ = unsafe { result::module::unload(module) };
        }
        // SAFETY: DRIVER-HANDLES; what was made in the context is gone.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::TYPES;

    #[test]
    fn devices_that_work_are_listed_beside_others_that_do_not() {
        let works = |device| {
            let (free_bytes, total_bytes) = (1, 2);
            let compute_capability = (8, 9);
            DeviceInfo { device, name: "works".into(), compute_capability, free_bytes, total_bytes }
        };
        let fails = |reason: &str| Err(unavailable(reason));
        let found = usable(vec![fails("first"), Ok(works(1)), fails("second"), Ok(works(3))]);
        assert_eq!(found, Ok(vec![works(1), works(3)]));
        assert_eq!(usable(vec![fails("first"), fails("second")]), Err(unavailable("first")));
    }

    #[test]
    fn every_kernel_is_in_the_text_of_its_module_for_both_generations() {
        for (ty, is_ampere) in
            std::iter::once(None).chain(TYPES.map(Some)).flat_map(|ty| [(ty, false), (ty, true)])
        {
            let text = ptx(ty, is_ampere);
            assert!(!text.contains('\0'));
            let target = if is_ampere { ".target sm_80" } else { ".target sm_61" };
            assert!(text.contains(target), "{ty:?}: {target}");
            for kernel in Kernel::of(ty) {
                let entry = format!(".entry {}(", kernel.name());
                assert!(text.contains(&entry), "{ty:?}, Ampere {is_ampere}: no `{entry}`");
                let params =
                    text.split(&entry).nth(1).and_then(|rest| rest.split(')').next()).unwrap_or_default();
                assert!(params.matches(".param").count() <= MAX_ARGS, "{}", kernel.name());
            }
        }
    }
}
