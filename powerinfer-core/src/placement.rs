//! Which neurons and which dense parts go where.

mod assignment;

pub use assignment::{Assignment, AssignmentError, LayerAssignment};
