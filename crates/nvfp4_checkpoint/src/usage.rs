//! How the NVFP4 weights of a model use their format: how often each code and each block scale occurs, and how much one
//! column exceeds the others.

use rayon::prelude::*;

use super::Checkpoint;
use super::convert::{Config, weights};
use super::names::natural;
use super::source::Source;
use nvfp4_core::Error;
use nvfp4_core::format::{BLOCK, e4m3};

/// Counts over the codes and scales of one weight.
#[derive(Clone, Debug, PartialEq)]
pub struct Usage {
    /// Name of the module; experts that share a tensor have the names of separate experts.
    pub module: String,
    /// Number of values with each e2m1 code.
    pub codes: [u64; 16],
    /// Number of blocks with each e4m3 code. Block scales are not negative.
    pub scales: [u64; 128],
    /// Column with the largest root-mean-square number.
    pub largest_column: usize,
    /// Root-mean-square number of this column relative to the median column; 0 if most columns are zero.
    pub column_ratio: f64,
}

impl Usage {
    /// Counts over the NVFP4 weights that `chosen` accepts by the names of their tensors or `M.weight`, in natural order.
    /// `done` receives the numbers of each weight.
    ///
    /// # Errors
    /// Returns an error if a weight cannot be read, or a file changed meanwhile.
    pub fn of(
        checkpoint: &Checkpoint,
        chosen: &dyn Fn(&str) -> bool,
        done: &dyn Fn(usize),
    ) -> Result<Vec<Self>, Error> {
        let (config, _) = Config::and_others(checkpoint)?;
        let mut all = Vec::new();
        for (name, readable) in weights::all(checkpoint, &config, false)? {
            if !readable.form.is_nvfp4() {
                continue;
            }
            for weight in readable.stored.weights {
                if chosen(name) || chosen(&format!("{}.weight", weight.module)) {
                    done(weight.source.sizes().iter().product());
                    all.push(Self::of_weight(weight.module, &weight.source));
                }
            }
            checkpoint.file_with(name).release();
        }
        checkpoint.check_unchanged()?;
        all.sort_by_cached_key(|usage| natural(&usage.module));
        Ok(all)
    }

    fn of_weight(module: String, source: &Source<'_>) -> Self {
        let (packed, blocks, _) = source.nvfp4().expect("the caller chose NVFP4");
        let count = |counts: &mut [u64], code: u8| counts[usize::from(code)] += 1;
        let (mut codes, mut scales) = ([0; 16], [0; 128]);
        for &pair in &*packed {
            count(&mut codes, pair & 0xF);
            count(&mut codes, pair >> 4);
        }
        blocks.iter().for_each(|&code| count(&mut scales, code & 0x7F));
        let [_, k] = source.sizes();
        let squares: Vec<Vec<f64>> = source
            .chunks()
            .map_init(Vec::new, |buffer, rows| {
                let mut sums = vec![0.0; k];
                for row in source.decoded(rows, buffer).chunks(k.max(1)) {
                    sums.iter_mut().zip(row).for_each(|(sum, &x)| *sum += f64::from(x) * f64::from(x));
                }
                sums
            })
            .collect();
        let columns: Vec<f64> =
            (0..k).map(|column| squares.iter().map(|sums| sums[column]).sum::<f64>().sqrt()).collect();
        let (largest_column, column_ratio) = ratio(&columns);
        Self { module, codes, scales, largest_column, column_ratio }
    }

    /// Number of block scales by the power of two of the scale: from 2⁻⁹ to 2⁸. Scales of zero are in no place.
    pub fn scales_by_power(&self) -> [u64; 18] {
        let mut powers = [0; 18];
        for (code, &count) in self.scales.iter().enumerate().filter(|(_, count)| **count > 0) {
            let scale = e4m3::decode(code as u8);
            if scale > 0.0 {
                powers[(scale.log2().floor() as i32 + 9) as usize] += count;
            }
        }
        powers
    }

    /// Number of blocks.
    pub fn blocks(&self) -> u64 {
        self.codes.iter().sum::<u64>() / BLOCK as u64
    }
}

/// Returns the index of the largest number, and its ratio to the median; 0 if the median is 0.
fn ratio(numbers: &[f64]) -> (usize, f64) {
    let largest =
        (0..numbers.len()).max_by(|&one, &other| numbers[one].total_cmp(&numbers[other]).then(other.cmp(&one)));
    let Some(largest) = largest else { return (0, 0.0) };
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    let median = sorted[sorted.len() / 2];
    (largest, if median == 0.0 { 0.0 } else { numbers[largest] / median })
}

#[cfg(test)]
mod tests {
    use super::ratio;

    #[test]
    fn largest_number_is_compared_with_the_median() {
        assert_eq!(ratio(&[1.0, 3.0, 1.0, 1.0]), (1, 3.0));
        assert_eq!(ratio(&[0.0, 3.0, 0.0]), (1, 0.0));
        assert_eq!(ratio(&[]), (0, 0.0));
    }
}
