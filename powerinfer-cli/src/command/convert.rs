//! `powerinfer convert`: the flags of [`crate::convert`].

use crate::args::ConvertArgs;
use crate::convert::{ConvertRequest, convert};
use crate::error::CliError;
use crate::options;
use crate::output::{print, with_tensor_bar};

pub(crate) fn run(args: &ConvertArgs) -> Result<(), CliError> {
    let request = ConvertRequest {
        activation: args.activation.map(options::activation),
        matrix_type: args.matrix_type,
        down_type: args.down_type,
        predictor_type: args.predictor_type,
        down_from: args.down_from.clone(),
        sparse_threshold: args.sparse_threshold,
        replace: args.force,
        ..ConvertRequest::new(&args.model, &args.predictor, &args.out)
    };
    let report = with_tensor_bar(|progress| convert(&request, progress))?;
    print(&format!("{}: {report}\n", args.out.display()))
}
