//! `cargo xtask picture`: runs `nvfp4 run` and draws its output as a terminal window, a picture of the book.

use std::fmt::Write as _;
use std::process::Command;

use crate::{
    document::{self, Mode},
    emulate::Nvfp4,
    tools,
};

/// Run `nvfp4 run` and draw its output as a picture of the book
#[derive(clap::Args)]
pub struct Args {}

const PICTURE: &str = "docs/book/src/images/run.svg";
const COMMAND: &str = "cargo xtask picture";

/// Width of a character and height of a line, at a font size of 20 pixels.
const CHARACTER: f64 = 12.2;
const LINE: f64 = 24.4;
const FONT: f64 = 20.0;

/// Minimum number of columns of the terminal.
const COLUMNS: usize = 100;

/// Frame of the window: width of its edge, and height of its bar with title and buttons.
const EDGE: f64 = 9.0;
const BAR: f64 = 41.0;

/// Runs the released command and writes the picture.
pub fn run(_: &Args) -> anyhow::Result<()> {
    let (output, _) = tools::output(Command::new(Nvfp4::build()?.path()).arg("run"))?;
    print!("{output}");
    let picture = draw(&format!("$ nvfp4 run\n{output}"));
    document::whole(PICTURE, &picture, Mode::Write, COMMAND)
}

/// Draws a terminal that shows `text`. The first line of `text` is the command.
fn draw(text: &str) -> String {
    let lines: Vec<_> = text.lines().map(str::trim_end).collect();
    let columns = lines.iter().map(|line| line.chars().count()).fold(COLUMNS, usize::max);
    let width = columns as f64 * CHARACTER + 2.0 * EDGE;
    let height = lines.len() as f64 * LINE + BAR + EDGE;
    let mut svg = format!(
        r##"<svg viewBox="0 0 {width:.1} {height:.1}" xmlns="http://www.w3.org/2000/svg">
<style>
  text {{ font-family: "Fira Code", monospace; font-size: {FONT}px; fill: #c5c8c6; white-space: pre }}
  .title {{ font-family: arial, sans-serif; font-size: 18px; font-weight: bold; text-anchor: middle }}
  .command {{ font-weight: bold }}
  .verified {{ font-weight: bold; fill: #98a84b }}
</style>
<rect x="1" y="1" width="{:.1}" height="{:.1}" rx="8" fill="#292929" stroke="#ffffff" stroke-opacity="0.35"/>
<circle cx="26" cy="22" r="7" fill="#ff5f57"/>
<circle cx="48" cy="22" r="7" fill="#febc2e"/>
<circle cx="70" cy="22" r="7" fill="#28c840"/>
<text class="title" x="{:.1}" y="27">nvfp4 run</text>
"##,
        width - 2.0,
        height - 2.0,
        width / 2.0
    );
    for (row, line) in lines.iter().enumerate().filter(|(_, line)| !line.is_empty()) {
        let class = match row {
            0 => r#" class="command""#,
            _ if line.starts_with("verified  yes") => r#" class="verified""#,
            _ => "",
        };
        // `textLength` keeps the columns aligned with any font.
        let length = line.chars().count() as f64 * CHARACTER;
        let y = BAR + FONT + row as f64 * LINE;
        let text = escaped(line);
        let _ = writeln!(svg, r#"<text{class} x="{EDGE}" y="{y:.1}" textLength="{length:.1}">{text}</text>"#);
    }
    svg + "</svg>\n"
}

/// Escapes a line for SVG text. Non-breaking spaces keep the spaces.
fn escaped(line: &str) -> String {
    line.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace(' ', "\u{a0}")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the text that a picture shows.
    fn shown(svg: &str) -> String {
        let lines = svg.lines().filter(|line| line.starts_with("<text") && !line.contains("\"title\""));
        let text = lines.map(|line| line.split_once('>').unwrap().1.strip_suffix("</text>").unwrap());
        let text = text.map(|line| line.replace('\u{a0}', " ").replace("&gt;", ">").replace("&lt;", "<"));
        text.map(|line| line.replace("&amp;", "&") + "\n").collect()
    }

    #[test]
    fn lines_are_drawn_at_their_terminal_positions() {
        let text = "$ nvfp4 run\nmoe-1 · a & b <c>  d\nverified  yes: all\nverified  NO\n";
        let svg = draw(text);
        assert_eq!(shown(&svg), text);
        assert!(svg.contains(r#"<text class="command" x="9" y="61.0" textLength="134.2">$"#), "{svg}");
        assert!(svg.contains(r#"<text class="verified" x="9" y="109.8" textLength="219.6">verified"#), "{svg}");
        assert_eq!(svg.matches(r#"class="verified""#).count(), 1);
        assert!(svg.starts_with(r#"<svg viewBox="0 0 1238.0 147.6""#), "{svg}");
        // A line longer than the terminal widens the window.
        assert!(draw(&"x".repeat(200)).starts_with(r#"<svg viewBox="0 0 2458.0 "#));
    }

    #[test]
    fn picture_of_the_book_shows_a_verified_run() {
        let svg = document::read(PICTURE).unwrap();
        let text = shown(&svg);
        assert_eq!(draw(&text), svg, "{PICTURE}: run `{COMMAND}`");
        assert!(text.starts_with("$ nvfp4 run\nmoe-1 gated") && text.contains("\nverified  yes: all "), "{text}");
        assert!(document::read("docs/book/src/guides/run.md").unwrap().contains("(../images/run.svg)"));
    }
}
