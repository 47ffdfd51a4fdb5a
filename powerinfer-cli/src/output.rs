//! Where text goes: results to standard output, everything else to standard error, files whole or not at all.

use std::io::{self, BufWriter, IsTerminal as _, Write};
use std::path::Path;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use crate::error::CliError;

/// Prints a line for people to standard error.
pub(crate) fn say(line: &str) {
    // There is no place left to complain to.
    let _ = writeln!(io::stderr(), "{line}");
}

/// Prints a result to standard output at once.
pub(crate) fn print(text: &str) -> Result<(), CliError> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(CliError::Stdout)
}

/// Prints a result as indented JSON.
pub(crate) fn print_json(value: &impl Serialize) -> Result<(), CliError> {
    let mut text = serde_json::to_string_pretty(value).expect("results are maps with string keys");
    text.push('\n');
    print(&text)
}

/// Writes a file that appears under its name when it is complete, or not at all.
pub(crate) fn write_file(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> Result<(), CliError>,
) -> Result<(), CliError> {
    let failed = |source| CliError::Write { path: path.to_owned(), source };
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let mut builder = tempfile::Builder::new();
    builder.prefix(".powerinfer-");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        // As for any new file: the user's mask takes away from this.
        builder.permissions(std::fs::Permissions::from_mode(0o666));
    }
    let file = builder.tempfile_in(folder).map_err(failed)?;
    let mut writer = BufWriter::new(file);
    write(&mut writer)?;
    let file = writer.into_inner().map_err(|error| failed(error.into_error()))?;
    file.persist(path).map_err(|error| failed(error.error))?;
    Ok(())
}

/// A progress bar on standard error, invisible where that is no terminal.
pub(crate) fn progress_bar(len: u64, template: &str) -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template(template).expect("templates are constants and well-formed");
    ProgressBar::with_draw_target(Some(len), ProgressDrawTarget::stderr()).with_style(style)
}

/// Shows a bar while a model is written; `write` calls its argument after each tensor with its name, and the bytes that
/// are written and that will be.
pub(crate) fn with_tensor_bar<T>(write: impl FnOnce(&mut dyn FnMut(&str, u64, u64)) -> T) -> T {
    let bar = progress_bar(0, "{bar:40} {bytes}/{total_bytes}, {eta} left  {msg}");
    let result = write(&mut |name, done, total| {
        bar.set_length(total);
        bar.set_position(done);
        bar.set_message(name.to_owned());
    });
    bar.finish_and_clear();
    result
}

/// A number of bytes for people.
pub(crate) fn bytes(n: f64) -> String {
    let mut value = n;
    for unit in ["B", "KiB", "MiB"] {
        if value < 1024.0 {
            return if unit == "B" { format!("{value:.0} B") } else { format!("{value:.2} {unit}") };
        }
        value /= 1024.0;
    }
    format!("{value:.2} GiB")
}

/// A share as a percentage.
pub(crate) fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// Lines of cells in aligned columns: the first column to the left, the others to the right.
pub(crate) fn table(rows: &[Vec<String>]) -> String {
    let n_columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..n_columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let width = widths[column];
            line += &if column == 0 { format!("{cell:<width$}") } else { format!("  {cell:>width$}") };
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_shown_in_the_unit_that_fits() {
        assert_eq!(bytes(0.0), "0 B");
        assert_eq!(bytes(1023.0), "1023 B");
        assert_eq!(bytes(1536.0), "1.50 KiB");
        assert_eq!(bytes(3.0 * 1024.0 * 1024.0), "3.00 MiB");
        assert_eq!(bytes(2.5 * 1024f64.powi(3)), "2.50 GiB");
        assert_eq!(bytes(5000.0 * 1024f64.powi(3)), "5000.00 GiB");
    }

    #[test]
    fn tables_align_by_characters() {
        let rows = [vec!["a".to_owned(), "±1".to_owned()], vec!["long".to_owned(), "22".to_owned()]];
        assert_eq!(table(&rows), "a     ±1\nlong  22\n");
    }

    #[test]
    fn a_file_that_fails_halfway_leaves_nothing_behind() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.json");
        let result = write_file(&path, |sink| {
            sink.write_all(b"half").unwrap();
            Err(CliError::Interrupted)
        });
        assert!(matches!(result, Err(CliError::Interrupted)));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        write_file(&path, |sink| sink.write_all(b"whole").map_err(CliError::Stdout)).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"whole");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
