//! The counting allocator counts.

use powerinfer_testing::alloc_guard::{CountingAllocator, measure, measure_all_threads};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[test]
fn peak_and_number_of_allocations_are_those_of_the_calling_thread() {
    let kept = vec![1u8; 5000];
    let (_, stats) = measure(|| {
        drop(vec![0u8; 3000]);
        drop(vec![0u8; 1000]);
    });
    assert_eq!((stats.peak_bytes, stats.n_allocs), (3000, 2));

    let (_, stats) = measure(|| drop(kept));
    assert_eq!((stats.peak_bytes, stats.n_allocs), (0, 0));

    // Growing holds the old and the new block for a moment.
    let (_, stats) = measure(|| {
        let mut grown = Vec::<u8>::with_capacity(100);
        grown.reserve_exact(200);
        grown
    });
    assert_eq!((stats.peak_bytes, stats.n_allocs), (300, 2));

    let (_, stats) = measure_all_threads(|| {
        std::thread::scope(|scope| {
            scope.spawn(|| drop(vec![0u8; 100_000]));
        });
    });
    assert!(stats.peak_bytes >= 100_000, "{stats:?}");

    let (_, stats) = measure(|| {
        std::thread::scope(|scope| {
            scope.spawn(|| drop(vec![0u8; 100_000]));
        });
    });
    assert!(stats.peak_bytes < 100_000, "{stats:?}");
}
