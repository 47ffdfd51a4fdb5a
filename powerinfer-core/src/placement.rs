//! Which neurons and which dense parts go where.
//!
//! [`plan`] fills devices with what saves most time for a byte; an [`Assignment`] is what loading takes.

mod adaptive;
mod assignment;
mod device;
mod machine;
mod make;
mod measure;
mod plan;
mod rates;
mod report;
mod saved;
mod shape;
mod simulation;

pub(crate) use adaptive::Adaptive;
pub use adaptive::AdaptiveOptions;
pub use assignment::{Assignment, AssignmentError, LayerAssignment};
pub use device::{ALLOCATION_BYTES, Accelerator, Bandwidth, Budget, Host};
pub use machine::{Machine, MachineError};
pub(crate) use make::Planning;
pub use plan::{DevicePlan, PartBytes, Plan, PlanOptions, PlanRequest, Statistics, plan};
pub use rates::{Rates, RatesError};
pub use report::PlanTable;
pub use saved::plan_path;
pub use shape::{LayerShape, ModelShape};
pub use simulation::{Simulated, Simulation, simulation};
