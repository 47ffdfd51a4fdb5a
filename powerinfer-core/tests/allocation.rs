//! A decode step allocates nothing, on any thread. Alone in its process, so that nobody else is counted.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod support;

use powerinfer_core::SessionOptions;
use powerinfer_sparse_ops::{ActiveMode, TokenId};
use powerinfer_testing::alloc_guard::{CountingAllocator, measure_all_threads};
use support::TinyFile;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[test]
fn a_decode_step_allocates_nothing() {
    for (file, modes) in [
        (TinyFile::sparse(), &[ActiveMode::Dense, ActiveMode::Exact, ActiveMode::Predictor][..]),
        (TinyFile::dense(), &[ActiveMode::Dense, ActiveMode::Exact]),
    ] {
        let model = file.load().unwrap();
        for &mode in modes {
            let options = SessionOptions { mode: Some(mode), ..SessionOptions::default() };
            let mut session = model.session(&options).unwrap();
            session.prefill(&[1, 5, 9].map(TokenId)).unwrap();
            session.decode(TokenId(7)).unwrap();
            let ((), stats) = measure_all_threads(|| {
                for id in 8..30 {
                    session.decode(TokenId(id)).unwrap();
                }
            });
            assert_eq!(stats.n_allocs, 0, "{:?} file, {mode:?}", file.magic);
        }
    }
}
