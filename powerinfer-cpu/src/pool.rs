//! Worker threads that share the chunks of one job after another.
//!
//! A job is a closure and a number of chunks. Each thread begins with a range of them of its own and takes one after the
//! other, so that what it reads lies together; whoever is done helps with the ranges of others. So timing decides *who*
//! computes a chunk and never *what* is computed. Starting a job takes one atomic store (and a wake-up for each
//! worker that went to sleep); there is no lock and no allocation. The caller works too, and waits only for
//! workers that have entered the job: one that the system has not scheduled yet holds nobody up. Workers that there
//! is no core for sleep through every job.
//!
//! ```text
//! state:  epoch (32 bits) | open (1) | workers inside (31)
//! ```

use std::any::Any;
use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use crate::cores::{allowed_cores, pin_to};

/// Bit of the state that says that workers may enter.
const OPEN: u64 = 1 << 31;
/// Bits of the state that count the workers inside.
const INSIDE: u64 = OPEN - 1;
/// Tries before an idle thread sleeps or yields, about 0.1 ms: longer than the serial part between two jobs of a step,
/// shorter than a person notices.
const SPINS: u32 = 2000;

/// A closure with its type erased, and how many chunks it is called for.
#[derive(Clone, Copy)]
struct Job {
    data: *const (),
    call: unsafe fn(*const (), usize, usize),
    n_chunks: usize,
}

/// Calls the closure behind `data`.
///
/// # Safety
/// `data` points to a live `F`.
unsafe fn call<F: Fn(usize, usize) + Sync>(data: *const (), chunk: usize, worker: usize) {
    // SAFETY: JOB-OUTLIVES-RUN, passed on by the caller; `F` is `Sync`, so a shared reference may be used on
    // any thread.
    let f = unsafe { &*data.cast::<F>() };
    f(chunk, worker);
}

/// What the threads share.
///
/// Invariant JOB-CLOSED: `job` is written only by `run`, with the state closed and nobody inside, and read only
/// by workers that entered while it was open (and by `run` itself).
///
/// Invariant JOB-OUTLIVES-RUN: `run` returns only after closing the state and seeing nobody inside, so `data` of
/// the job, a borrow of its argument, is alive for as long as anyone can call it.
struct Shared {
    state: AtomicU64,
    /// The next chunk of the range of each thread.
    next_chunks: Vec<NextChunk>,
    job: UnsafeCell<Job>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stop: AtomicBool,
    sleeping: Vec<AtomicBool>,
    n_started: AtomicUsize,
}

/// On a cache line of its own, since threads write it all the time.
#[repr(align(64))]
struct NextChunk(AtomicUsize);

/// The chunks that a thread begins with.
fn range_of(thread: usize, n_threads: usize, n_chunks: usize) -> Range<usize> {
    n_chunks * thread / n_threads..n_chunks * (thread + 1) / n_threads
}

// SAFETY: only `job` is not `Send` and `Sync` by itself. A read could race with a write of it; JOB-CLOSED says
// that there is none at that time. The closure it points to is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointer in `job` is used only while JOB-OUTLIVES-RUN holds, on whatever thread.
unsafe impl Send for Shared {}

impl Shared {
    /// Takes chunks until there are none left: those of its own range, then those of the ranges behind it.
    fn work(&self, job: Job, worker: usize) {
        let n_threads = self.next_chunks.len();
        let result = catch_unwind(AssertUnwindSafe(|| {
            for i in 0..n_threads {
                let thread = (worker + i) % n_threads;
                let end = range_of(thread, n_threads, job.n_chunks).end;
                let next = &self.next_chunks[thread].0;
                while next.load(Ordering::Relaxed) < end {
                    let chunk = next.fetch_add(1, Ordering::Relaxed);
                    if chunk < end {
                        // SAFETY: JOB-OUTLIVES-RUN: this thread runs `run` or is counted inside.
                        unsafe { (job.call)(job.data, chunk, worker) };
                    }
                }
            }
        }));
        if let Err(payload) = result {
            // The rest of the job is not worth doing.
            self.next_chunks.iter().for_each(|next| next.0.store(job.n_chunks, Ordering::Relaxed));
            *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(payload);
        }
    }

    /// Waits for a job later than `seen` and enters it. Returns its epoch, or `None` when the pool ends.
    fn enter(&self, seen: u64, worker: usize) -> Option<u64> {
        let mut spun = 0;
        loop {
            if self.stop.load(Ordering::Acquire) {
                return None;
            }
            let state = self.state.load(Ordering::SeqCst);
            if state & OPEN != 0 && state >> 32 != seen {
                let entered =
                    self.state.compare_exchange_weak(state, state + 1, Ordering::AcqRel, Ordering::Relaxed);
                if entered.is_ok() {
                    return Some(state >> 32);
                }
            } else if spun < SPINS {
                spun += 1;
                std::hint::spin_loop();
            } else {
                // Whoever opens a job first writes the state and then reads this flag; here the order is the
                // other way round, so one of the two notices the other.
                let sleeping = &self.sleeping[worker - 1];
                sleeping.store(true, Ordering::SeqCst);
                let state = self.state.load(Ordering::SeqCst);
                if (state & OPEN == 0 || state >> 32 == seen) && !self.stop.load(Ordering::SeqCst) {
                    thread::park();
                }
                sleeping.store(false, Ordering::SeqCst);
                spun = 0;
            }
        }
    }

    fn serve(&self, worker: usize) {
        self.n_started.fetch_add(1, Ordering::Release);
        let mut seen = 0;
        while let Some(epoch) = self.enter(seen, worker) {
            seen = epoch;
            // SAFETY: JOB-CLOSED: this thread is counted inside, so nobody writes.
            let job = unsafe { *self.job.get() };
            self.work(job, worker);
            self.state.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

/// Named worker threads; see the module text. Dropping it ends and joins them.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    epoch: u32,
    /// Workers worth waking: there are no cores for more beside the caller. With 3, 4 and 8 threads on 2 quiet cores,
    /// waking one more cost a tenth to a fifth of the speed of decoding (135M weights, Q8_0), and with this they
    /// are as fast as 2. With another program busy on one of the cores it is the other way round: more threads get a
    /// larger share.
    max_awake: usize,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pool({} threads)", self.n_threads())
    }
}

impl Pool {
    /// Starts `n_threads − 1` workers; the thread that calls [`Pool::run`] is the last one. 0 counts as 1.
    ///
    /// # Errors
    /// If the system refuses to start a thread.
    pub fn try_new(n_threads: usize) -> std::io::Result<Self> {
        Self::start(n_threads, &[])
    }

    /// As [`Pool::try_new`], and keeps each worker on a physical core of its own, if the calling thread may run on
    /// that many and the system allows it (Linux alone). The first core is left for the caller, who stays free.
    ///
    /// On two quiet cores decoding was as fast with it as without; with another program busy on the core of a worker,
    /// who then could not get away, a fifth slower. It is meant for machines with nothing else to do, and for
    /// one pool: a second one would take the same cores.
    ///
    /// # Errors
    /// If the system refuses to start a thread.
    pub fn try_pinned(n_threads: usize) -> std::io::Result<Self> {
        let cores = allowed_cores().filter(|cores| cores.len() >= n_threads);
        Self::start(n_threads, &cores.unwrap_or_default())
    }

    /// `cores`: the CPU of each thread, that of the caller too; none to pin nobody.
    fn start(n_threads: usize, cores: &[usize]) -> std::io::Result<Self> {
        let n_workers = n_threads.max(1) - 1;
        let n_cpus = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            next_chunks: (0..=n_workers).map(|_| NextChunk(AtomicUsize::new(0))).collect(),
            job: UnsafeCell::new(Job { data: std::ptr::null(), call: call::<fn(usize, usize)>, n_chunks: 0 }),
            panic: Mutex::new(None),
            stop: AtomicBool::new(false),
            sleeping: (0..n_workers).map(|_| AtomicBool::new(false)).collect(),
            n_started: AtomicUsize::new(0),
        });
        let mut pool =
            Self { shared, workers: Vec::with_capacity(n_workers), epoch: 0, max_awake: (n_cpus - 1).max(1) };
        for worker in 1..=n_workers {
            let shared = Arc::clone(&pool.shared);
            let core = cores.get(worker).copied();
            // On failure the ones that run are joined by `drop`.
            pool.workers.push(thread::Builder::new().name(format!("powerinfer-{worker}")).spawn(
                move || {
                    core.into_iter().for_each(pin_to);
                    shared.serve(worker);
                },
            )?);
        }
        // A thread allocates while it starts, which must not fall into a step.
        while pool.shared.n_started.load(Ordering::Acquire) < n_workers {
            thread::yield_now();
        }
        Ok(pool)
    }

    /// Number of threads that work on a job, the caller included.
    pub fn n_threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `f(chunk, worker)` once for each `chunk` in `0..n_chunks`, on whatever threads are free, and
    /// returns when all are done. `worker` is below [`Pool::n_threads`], and never the same on two threads
    /// (WORKER-ONCE).
    ///
    /// # Panics
    /// If a call panics: with the payload of one of those that did. Chunks not begun by then are left out.
    pub fn run<F: Fn(usize, usize) + Sync>(&mut self, n_chunks: usize, f: F) {
        if self.workers.is_empty() || n_chunks <= 1 {
            return (0..n_chunks).for_each(|chunk| f(chunk, 0));
        }
        let shared = &*self.shared;
        let job = Job { data: (&raw const f).cast(), call: call::<F>, n_chunks };
        // SAFETY: JOB-CLOSED: `&mut self` excludes another `run`, and the last one left with nobody inside.
        unsafe { *shared.job.get() = job };
        let n_threads = shared.next_chunks.len();
        for (thread, next) in shared.next_chunks.iter().enumerate() {
            next.0.store(range_of(thread, n_threads, n_chunks).start, Ordering::Relaxed);
        }
        // Epoch 0 is what workers start with.
        self.epoch = self.epoch.wrapping_add(1).max(1);
        shared.state.store(u64::from(self.epoch) << 32 | OPEN, Ordering::SeqCst);
        let worth_waking = (n_chunks - 1).min(self.max_awake);
        for (sleeping, worker) in shared.sleeping.iter().zip(&self.workers).take(worth_waking) {
            if sleeping.load(Ordering::SeqCst) {
                worker.thread().unpark();
            }
        }
        shared.work(job, 0);
        let mut state = shared.state.fetch_and(!OPEN, Ordering::AcqRel);
        let mut spun = 0;
        while state & INSIDE != 0 {
            if spun < SPINS {
                spun += 1;
                std::hint::spin_loop();
            } else {
                thread::yield_now();
            }
            state = shared.state.load(Ordering::Acquire);
        }
        if let Some(payload) = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take() {
            resume_unwind(payload);
        }
    }

    /// Cuts `data` into pieces of `piece_len` (the last may be shorter) and calls `f(piece index, piece)` once
    /// for each.
    ///
    /// # Panics
    /// If `piece_len` is 0 or a call panics.
    pub fn run_pieces<T: Send, F: Fn(usize, &mut [T]) + Sync>(
        &mut self,
        data: &mut [T],
        piece_len: usize,
        f: F,
    ) {
        let width = data.len();
        self.run_columns(data, width, piece_len, |piece, columns| f(piece, columns.row(0)));
    }

    /// Cuts three arrays into the same number of pieces, each with its own piece length, and calls `f(piece index,
    /// piece, piece, piece)` once for each.
    ///
    /// # Panics
    /// If an array is not whole pieces, their numbers differ, or a call panics.
    pub fn run_zipped<A: Send, B: Send, C: Send, F>(
        &mut self,
        (a, a_len): (&mut [A], usize),
        (b, b_len): (&mut [B], usize),
        (c, c_len): (&mut [C], usize),
        f: F,
    ) where
        F: Fn(usize, &mut [A], &mut [B], &mut [C]) + Sync,
    {
        let n = a.len() / a_len;
        let lens = [(a.len(), a_len), (b.len(), b_len), (c.len(), c_len)];
        assert!(lens.iter().all(|&(len, piece)| len == n * piece), "{lens:?}: arrays in {n} pieces");
        let (a, b, c) = (Base(a.as_mut_ptr()), Base(b.as_mut_ptr()), Base(c.as_mut_ptr()));
        self.run(n, |piece, _| {
            let part = piece..piece + 1;
            let band = |width: usize| part.start * width..part.end * width;
            f(
                piece,
                Columns {
                    base: a.get(),
                    n_rows: 1,
                    width: n * a_len,
                    columns: band(a_len),
                    data: PhantomData,
                }
                .row(0),
                Columns {
                    base: b.get(),
                    n_rows: 1,
                    width: n * b_len,
                    columns: band(b_len),
                    data: PhantomData,
                }
                .row(0),
                Columns {
                    base: c.get(),
                    n_rows: 1,
                    width: n * c_len,
                    columns: band(c_len),
                    data: PhantomData,
                }
                .row(0),
            );
        });
    }

    /// Sees `data` as rows of `width` and cuts it into bands of `band_len` columns (the last may be narrower);
    /// calls `f(band index, band)` once for each.
    ///
    /// # Panics
    /// If `data` is not whole rows, `band_len` is 0, or a call panics.
    pub fn run_columns<T: Send, F: Fn(usize, &mut Columns<'_, T>) + Sync>(
        &mut self,
        data: &mut [T],
        width: usize,
        band_len: usize,
        f: F,
    ) {
        let n_rows = data.len().checked_div(width).unwrap_or(0);
        self.run_tiles(data, width, n_rows, band_len, |_, band, columns| f(band, columns));
    }

    /// Sees `data` as rows of `width`, and cuts it into tiles of `n_rows` rows and `n_columns` columns (the last ones
    /// may be smaller); calls `f(tile row, tile column, tile)` once for each.
    ///
    /// # Panics
    /// If `data` is not whole rows, a size is 0 where there are data, or a call panics.
    pub fn run_tiles<T: Send, F: Fn(usize, usize, &mut Columns<'_, T>) + Sync>(
        &mut self,
        data: &mut [T],
        width: usize,
        n_rows: usize,
        n_columns: usize,
        f: F,
    ) {
        if data.is_empty() {
            return;
        }
        assert!(data.len().is_multiple_of(width), "{} elements in rows of {width}", data.len());
        let all_rows = data.len() / width;
        let n_bands = width.div_ceil(n_columns);
        let base = Base(data.as_mut_ptr());
        self.run(all_rows.div_ceil(n_rows) * n_bands, |tile, _| {
            let (tile, band) = (tile / n_bands, tile % n_bands);
            let (start, columns) = (tile * n_rows, band * n_columns..width.min((band + 1) * n_columns));
            let n_rows = n_rows.min(all_rows - start);
            let base = base.get().wrapping_add(start * width);
            f(tile, band, &mut Columns { base, n_rows, width, columns, data: PhantomData });
        });
    }

    /// As [`Pool::run_columns`], with something for the thread that does the work: `f(band index, band, local)`.
    ///
    /// # Panics
    /// As [`Pool::run_columns`], or if there are fewer `locals` than threads.
    pub fn run_columns_with<T: Send, L: Send, F: Fn(usize, &mut Columns<'_, T>, &mut L) + Sync>(
        &mut self,
        data: &mut [T],
        width: usize,
        band_len: usize,
        locals: &mut [L],
        f: F,
    ) {
        let (n_locals, n_threads) = (locals.len(), self.n_threads());
        assert!(n_locals >= n_threads, "{n_locals} buffers for {n_threads} threads");
        if data.is_empty() {
            return;
        }
        assert!(data.len().is_multiple_of(width), "{} elements in rows of {width}", data.len());
        let n_rows = data.len() / width;
        let base = Base(data.as_mut_ptr());
        let locals = Base(locals.as_mut_ptr());
        self.run(width.div_ceil(band_len), |band, worker| {
            let columns = band * band_len..width.min((band + 1) * band_len);
            let local = locals.get().wrapping_add(worker);
            // SAFETY: WORKER-ONCE: `worker` is below the number of threads, so the element is inside the array, which
            // is borrowed mutably meanwhile; no two threads have the same number at a time, and a thread is in one
            // call at a time.
            let local = unsafe { &mut *local };
            f(band, &mut Columns { base: base.get(), n_rows, width, columns, data: PhantomData }, local);
        });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for worker in &self.workers {
            worker.thread().unpark();
        }
        for worker in self.workers.drain(..) {
            // A worker catches the panics of its jobs, so there is nothing to hear of here.
            let _ = worker.join();
        }
    }
}

/// Start of an array whose bands are handed to different threads.
struct Base<T>(*mut T);

impl<T> Base<T> {
    fn get(&self) -> *mut T {
        self.0
    }
}

// SAFETY: the pointer itself is only copied. What is done with it is `Columns::row`, which keeps to one band, and
// each band goes to one call (BAND-ONCE), and the choice of one element a thread (WORKER-ONCE); the elements are `Send`.
unsafe impl<T: Send> Sync for Base<T> {}

/// A band of columns of a row-major array or of some of its rows, for one thread.
///
/// Invariant BAND-ONCE: made by [`Pool::run_tiles`], [`Pool::run_columns_with`] and [`Pool::run_zipped`] alone, which
/// borrow the whole array mutably while they run, make one for each band, and bands do not overlap.
#[derive(Debug)]
pub struct Columns<'a, T> {
    base: *mut T,
    n_rows: usize,
    width: usize,
    columns: Range<usize>,
    data: PhantomData<&'a mut [T]>,
}

impl<T> Columns<'_, T> {
    /// Which columns these are.
    pub fn range(&self) -> Range<usize> {
        self.columns.clone()
    }

    /// Number of rows.
    pub fn n_rows(&self) -> usize {
        self.n_rows
    }

    /// The band's part of one row.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn row(&mut self, row: usize) -> &mut [T] {
        assert!(row < self.n_rows, "row {row} of {}", self.n_rows);
        let start = self.base.wrapping_add(row * self.width + self.columns.start);
        // SAFETY: BAND-ONCE: row and columns are inside the array, nobody else has this band, and the borrow of
        // `self` keeps its rows apart.
        unsafe { std::slice::from_raw_parts_mut(start, self.columns.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chunk_is_called_once_whatever_the_thread_count() {
        for n_threads in [0, 1, 2, 3, 8, 33] {
            let mut pool = Pool::try_new(n_threads).unwrap();
            assert_eq!(pool.n_threads(), n_threads.max(1));
            for n_chunks in [0, 1, 2, 7, 100] {
                for _ in 0..20 {
                    let calls: Vec<_> = (0..n_chunks).map(|_| AtomicUsize::new(0)).collect();
                    let n_threads = pool.n_threads();
                    pool.run(n_chunks, |chunk, worker| {
                        assert!(worker < n_threads);
                        calls[chunk].fetch_add(1, Ordering::Relaxed);
                    });
                    assert!(calls.iter().all(|c| c.load(Ordering::Relaxed) == 1));
                }
            }
        }
    }

    #[test]
    fn sleeping_workers_wake_up() {
        let mut pool = Pool::try_new(3).unwrap();
        for _ in 0..3 {
            // Longer than any worker spins.
            thread::sleep(std::time::Duration::from_millis(20));
            let inside = AtomicUsize::new(0);
            pool.run(2, |_, _| {
                inside.fetch_add(1, Ordering::SeqCst);
                // Two chunks that wait for each other need two threads.
                while inside.load(Ordering::SeqCst) < 2 {
                    thread::yield_now();
                }
            });
        }
    }

    #[test]
    fn pinned_workers_work_and_leave_the_caller_free() {
        let before = allowed_cores();
        let n_cores = before.as_ref().map_or(1, Vec::len);
        for n_threads in [0, 1, n_cores, n_cores + 1] {
            let mut pool = Pool::try_pinned(n_threads).unwrap();
            let sum = AtomicUsize::new(0);
            pool.run(100, |chunk, _| {
                sum.fetch_add(chunk, Ordering::Relaxed);
            });
            assert_eq!((pool.n_threads(), sum.into_inner()), (n_threads.max(1), 4950));
        }
        assert_eq!(allowed_cores(), before);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
        for n_threads in [1, 3] {
            let mut pool = Pool::try_new(n_threads).unwrap();
            for bad in [0, 50, 99] {
                let result = catch_unwind(AssertUnwindSafe(|| {
                    pool.run(100, |chunk, _| assert_ne!(chunk, bad, "chunk {bad} is bad"));
                }));
                let payload = result.unwrap_err();
                assert!(payload.downcast_ref::<String>().unwrap().contains("is bad"));
            }
            let sum = AtomicUsize::new(0);
            pool.run(10, |chunk, _| {
                sum.fetch_add(chunk, Ordering::Relaxed);
            });
            assert_eq!(sum.into_inner(), 45);
        }
    }

    #[test]
    fn bands_cover_an_array_once() {
        let mut pool = Pool::try_new(3).unwrap();
        let mut data = vec![0u32; 3 * 10];
        pool.run_columns(&mut data, 10, 4, |band, columns| {
            for row in 0..columns.n_rows() {
                let start = columns.range().start;
                for (i, x) in columns.row(row).iter_mut().enumerate() {
                    *x += (row * 1000 + band * 100 + start + i) as u32;
                }
            }
        });
        let expected: Vec<u32> =
            (0..3).flat_map(|r| (0..10).map(move |c| r * 1000 + c / 4 * 100 + c)).collect();
        assert_eq!(data, expected);
        pool.run_pieces(&mut data, 7, |piece, part| part.fill(piece as u32));
        assert_eq!((data[0], data[6], data[7], data[29]), (0, 0, 1, 4));
        pool.run_pieces(&mut [0u8; 0], 4, |_, _| panic!("there is nothing to do"));
    }
}
