//! Dates as `strftime` writes them, in UTC and English.

use minijinja::{Error, ErrorKind};
use std::fmt::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

const DAY_S: i64 = 86_400;

#[derive(Debug)]
struct Date {
    year: i64,
    /// From 1.
    month: usize,
    /// From 1.
    day: i64,
    /// From 1.
    day_of_year: i64,
    /// From Sunday, 0.
    weekday: usize,
    second_of_day: i64,
}

impl Date {
    fn of(time: SystemTime) -> Self {
        let second = match time.duration_since(UNIX_EPOCH) {
            Ok(after) => i64::try_from(after.as_secs()).unwrap_or(0),
            Err(before) => -i64::try_from(before.duration().as_secs()).unwrap_or(0),
        };
        let days = second.div_euclid(DAY_S);
        let mut year = 1970 + days.div_euclid(366);
        // At most one year too early for each 1464 years from 1970.
        while days >= first_day(year + 1) {
            year += 1;
        }
        let day_of_year = days - first_day(year);
        let lengths = [31, 28 + i64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
        let (mut month, mut day) = (0, day_of_year);
        while day >= lengths[month] {
            day -= lengths[month];
            month += 1;
        }
        Self {
            year,
            month: month + 1,
            day: day + 1,
            day_of_year: day_of_year + 1,
            // 1970-01-01 was a Thursday.
            weekday: (days + 4).rem_euclid(7) as usize,
            second_of_day: second.rem_euclid(DAY_S),
        }
    }
}

fn is_leap(year: i64) -> bool {
    year % 4 == 0 && (year % 100 != 0 || year % 400 == 0)
}

/// Days from 1970-01-01 to January 1 of a year.
fn first_day(year: i64) -> i64 {
    let before = year - 1;
    let leap_days = |y: i64| y.div_euclid(4) - y.div_euclid(100) + y.div_euclid(400);
    (year - 1970) * 365 + leap_days(before) - leap_days(1969)
}

/// Writes a time by a format with `%` codes.
pub(super) fn strftime(format: &str, time: SystemTime) -> Result<String, Error> {
    let date = Date::of(time);
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut code = chars.next();
        let unpadded = code == Some('-');
        if unpadded {
            code = chars.next();
        }
        push_code(&mut out, &date, code, unpadded).ok_or_else(|| {
            Error::new(
                ErrorKind::InvalidOperation,
                format!("strftime_now: format `{format}` is not supported"),
            )
        })?;
    }
    Ok(out)
}

/// Appends what one code stands for; `None` if it is not supported.
fn push_code(out: &mut String, date: &Date, code: Option<char>, unpadded: bool) -> Option<()> {
    let (hour, minute, second) =
        (date.second_of_day / 3600, date.second_of_day / 60 % 60, date.second_of_day % 60);
    let hour12 = (hour + 11) % 12 + 1;
    let (number, width) = match code? {
        'Y' => (date.year, 1),
        'y' => (date.year.rem_euclid(100), 2),
        'm' => (date.month as i64, 2),
        'd' => (date.day, 2),
        'j' => (date.day_of_year, 3),
        'H' => (hour, 2),
        'I' => (hour12, 2),
        'M' => (minute, 2),
        'S' => (second, 2),
        'w' => (date.weekday as i64, 1),
        text => {
            match text {
                'B' => out.push_str(MONTHS[date.month - 1]),
                'b' | 'h' => out.push_str(&MONTHS[date.month - 1][..3]),
                'A' => out.push_str(DAYS[date.weekday]),
                'a' => out.push_str(&DAYS[date.weekday][..3]),
                'p' => out.push_str(if hour < 12 { "AM" } else { "PM" }),
                'Z' => out.push_str("UTC"),
                'z' => out.push_str("+0000"),
                'F' => return [('Y'), '-', 'm', '-', 'd'].into_iter().try_for_each(|c| nested(out, date, c)),
                'T' => return ['H', ':', 'M', ':', 'S'].into_iter().try_for_each(|c| nested(out, date, c)),
                'n' => out.push('\n'),
                't' => out.push('\t'),
                '%' => out.push('%'),
                _ => return None,
            }
            return Some(());
        }
    };
    let width = if unpadded { 1 } else { width };
    write!(out, "{number:0width$}").ok()
}

fn nested(out: &mut String, date: &Date, c: char) -> Option<()> {
    if c.is_ascii_alphabetic() {
        push_code(out, date, Some(c), false)
    } else {
        out.push(c);
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::strftime;
    use std::time::{Duration, UNIX_EPOCH};

    #[test]
    fn known_dates() {
        let cases = [
            (0, "%Y-%m-%d %H:%M:%S %a %j", "1970-01-01 00:00:00 Thu 001"),
            (951_782_400, "%d %B %Y, %A", "29 February 2000, Tuesday"),
            (1_735_689_599, "%F %T %I %p %y %j", "2024-12-31 23:59:59 11 PM 24 366"),
            (1_709_164_800, "%-d %b %Y 100%%", "29 Feb 2024 100%"),
            (4_102_444_800, "%F", "2100-01-01"),
            (253_402_300_799, "%F", "9999-12-31"),
        ];
        for (second, format, expected) in cases {
            assert_eq!(
                strftime(format, UNIX_EPOCH + Duration::from_secs(second)).expect("supported"),
                expected
            );
        }
        let before = UNIX_EPOCH - Duration::from_secs(1);
        assert_eq!(strftime("%F %T", before).expect("supported"), "1969-12-31 23:59:59");
    }

    #[test]
    fn unknown_codes_are_errors() {
        for format in ["%Q", "100%", "%-"] {
            let error = strftime(format, UNIX_EPOCH).expect_err("not supported");
            assert!(error.to_string().contains(format));
        }
    }
}
