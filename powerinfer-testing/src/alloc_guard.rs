//! Counting what the heap is asked for. The only file of this crate with unsafe code.
//!
//! A test binary installs the allocator once, and then measures parts of itself:
//!
//! ```
//! use powerinfer_testing::alloc_guard::{CountingAllocator, measure};
//!
//! #[global_allocator]
//! static ALLOCATOR: CountingAllocator = CountingAllocator;
//!
//! let (buffer, stats) = measure(|| vec![0u8; 1000]);
//! assert_eq!(buffer.len(), 1000);
//! assert_eq!(stats.n_allocs, 1);
//! assert_eq!(stats.peak_bytes, 1000);
//! ```
#![expect(unsafe_code, reason = "an allocator is an unsafe trait")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

/// The system's allocator with counters.
#[derive(Clone, Copy, Debug, Default)]
pub struct CountingAllocator;

/// What a measured piece of code asked of the heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllocStats {
    /// Most bytes held at one time, beyond those held at the start.
    pub peak_bytes: u64,
    /// Number of allocations; growing or shrinking a block counts as one.
    pub n_allocs: u64,
}

#[derive(Clone, Copy)]
struct Counters {
    held: i64,
    peak: i64,
    n_allocs: u64,
}

thread_local! {
    // Constant and without a destructor, so that the allocator may use it at any time of a thread's life.
    static THREAD: Cell<Counters> = const { Cell::new(Counters { held: 0, peak: 0, n_allocs: 0 }) };
}

static ALL_HELD: AtomicI64 = AtomicI64::new(0);
static ALL_PEAK: AtomicI64 = AtomicI64::new(0);
static ALL_ALLOCS: AtomicU64 = AtomicU64::new(0);

/// `growth` is what a call added to the bytes held; `n_allocs` is 0 for a release.
fn count(growth: i64, n_allocs: u64) {
    let update = |cell: &Cell<Counters>| {
        let mut counters = cell.get();
        counters.held += growth;
        counters.peak = counters.peak.max(counters.held);
        counters.n_allocs += n_allocs;
        cell.set(counters);
    };
    let _ = THREAD.try_with(update);
    let held = ALL_HELD.fetch_add(growth, Ordering::Relaxed) + growth;
    ALL_PEAK.fetch_max(held, Ordering::Relaxed);
    ALL_ALLOCS.fetch_add(n_allocs, Ordering::Relaxed);
}

fn signed(n_bytes: usize) -> i64 {
    n_bytes.try_into().expect("blocks are shorter than 2^63 bytes")
}

// SAFETY: ALLOC-FORWARDED. Every call is passed on unchanged to `System`, whose answers are returned
// unchanged; counting allocates nothing and does not panic for sizes that a layout can have.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: ALLOC-FORWARDED; the caller keeps the rules of `alloc`, which are those of `System`.
        let block = unsafe { System.alloc(layout) };
        if !block.is_null() {
            count(signed(layout.size()), 1);
        }
        block
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: ALLOC-FORWARDED; the caller keeps the rules of `alloc_zeroed`, which are those of `System`.
        let block = unsafe { System.alloc_zeroed(layout) };
        if !block.is_null() {
            count(signed(layout.size()), 1);
        }
        block
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: ALLOC-FORWARDED; the block came from `System` through this allocator, with this layout.
        unsafe { System.dealloc(block, layout) };
        count(-signed(layout.size()), 0);
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: ALLOC-FORWARDED; the block came from `System` through this allocator, with this layout.
        let moved = unsafe { System.realloc(block, layout, new_size) };
        if !moved.is_null() {
            // While a block moves, both may be held.
            count(signed(new_size), 1);
            count(-signed(layout.size()), 0);
        }
        moved
    }
}

/// Runs `work` and says what the calling thread asked of the heap meanwhile. Calls may be nested only if the
/// inner one is the last: it restarts the peak.
///
/// # Panics
/// If [`CountingAllocator`] is not the program's global allocator.
pub fn measure<T>(work: impl FnOnce() -> T) -> (T, AllocStats) {
    assert_installed();
    let start = THREAD.get();
    THREAD.set(Counters { peak: start.held, ..start });
    let result = work();
    let end = THREAD.get();
    (result, stats(start.held, end.peak, end.n_allocs - start.n_allocs))
}

/// Runs `work` and says what all threads of the program asked of the heap meanwhile. Two calls at the same
/// time disturb each other.
///
/// # Panics
/// If [`CountingAllocator`] is not the program's global allocator.
pub fn measure_all_threads<T>(work: impl FnOnce() -> T) -> (T, AllocStats) {
    assert_installed();
    let held = ALL_HELD.load(Ordering::SeqCst);
    ALL_PEAK.store(held, Ordering::SeqCst);
    let n_allocs = ALL_ALLOCS.load(Ordering::SeqCst);
    let result = work();
    let n_allocs = ALL_ALLOCS.load(Ordering::SeqCst) - n_allocs;
    (result, stats(held, ALL_PEAK.load(Ordering::SeqCst), n_allocs))
}

fn stats(held: i64, peak: i64, n_allocs: u64) -> AllocStats {
    AllocStats { peak_bytes: u64::try_from(peak - held).unwrap_or(0), n_allocs }
}

fn assert_installed() {
    let before = THREAD.get().n_allocs;
    drop(std::hint::black_box(Box::new(1u8)));
    assert!(
        THREAD.get().n_allocs > before,
        "`CountingAllocator` is not the global allocator of this program"
    );
}
