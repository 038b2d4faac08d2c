//! Amounts and times as people write them on a command line.

use std::time::Duration;

/// Bytes from `16GiB`, `512MiB`, `8G` or a plain number.
///
/// # Errors
/// If it is no such amount.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let (number, unit) = split(text);
    let factor: u64 = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        _ => return Err(format!("unit {unit:?} is not one of KiB, MiB, GiB, TiB")),
    };
    let number: f64 = number.parse().map_err(|_| format!("{text:?} is not an amount such as 16GiB"))?;
    let bytes = number * factor as f64;
    if bytes >= 1.0 && bytes < u64::MAX as f64 { Ok(bytes as u64) } else { Err(format!("{text:?} is out of range")) }
}

/// The longest time that is taken: ten years, which the system's clock can be moved on by without leaving what it can say.
const TIME_MAX: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// A time from `90s`, `5m`, `2h` or a plain number of seconds.
///
/// # Errors
/// If it is no such time.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = split(text);
    let factor = match unit {
        "ms" => 1e-3,
        "" | "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        _ => return Err(format!("unit {unit:?} is not one of ms, s, m, h")),
    };
    let number: f64 = number.parse().map_err(|_| format!("{text:?} is not a time such as 5m"))?;
    let seconds = number * factor;
    if seconds > TIME_MAX.as_secs_f64() {
        return Err(format!("{text:?} is more than {} h", TIME_MAX.as_secs() / 3600));
    }
    let duration = Duration::try_from_secs_f64(seconds).map_err(|error| format!("{text:?}: {error}"))?;
    if duration.is_zero() { Err(format!("{text:?} is no time at all")) } else { Ok(duration) }
}

fn split(text: &str) -> (&str, &str) {
    let text = text.trim();
    let end = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    (text[..end].trim(), text[end..].trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_read_as_people_write_them() {
        for (text, bytes) in [("16GiB", 16 << 30), ("1.5 g", 3 << 29), ("4096", 4096), ("512MiB", 512 << 20)] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["", "GiB", "-1G", "0", "1e400", "5 parsecs", "nan"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn times_are_read_as_people_write_them() {
        for (text, seconds) in
            [("5m", 300.0), ("90", 90.0), ("1s", 1.0), ("250ms", 0.25), ("2h", 7200.0), ("87600h", 315_360_000.0)]
        {
            assert_eq!(parse_duration(text), Ok(Duration::from_secs_f64(seconds)), "{text}");
        }
        for text in ["", "s", "-1s", "0", "5 years", "nan", "inf", "87601h", "5000000000000000h", "99999999999999999999s"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }
}
