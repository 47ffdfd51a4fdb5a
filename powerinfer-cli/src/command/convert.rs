//! `powerinfer convert`: the flags of [`crate::convert`].

use crate::args::ConvertArgs;
use crate::convert::{ConvertRequest, convert};
use crate::error::CliError;
use crate::options;
use crate::output::{print, progress_bar};

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
    let bar = progress_bar(0, "{bar:40} {bytes}/{total_bytes}, {eta} left  {msg}");
    let report = convert(&request, &mut |name, done, total| {
        bar.set_length(total);
        bar.set_position(done);
        bar.set_message(name.to_owned());
    })?;
    bar.finish_and_clear();
    print(&format!("{}: {report}\n", args.out.display()))
}
