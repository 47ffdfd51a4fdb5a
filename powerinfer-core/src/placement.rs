//! Which neurons and which dense parts go where.

mod adaptive;
mod assignment;

pub(crate) use adaptive::Adaptive;
pub use adaptive::AdaptiveOptions;
pub use assignment::{Assignment, AssignmentError, LayerAssignment};
