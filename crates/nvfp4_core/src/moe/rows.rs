//! The tokens of each expert of a layer: the same lists that a device makes, made on the host.

/// In [`Rows::places`]: the choice has no row.
pub const NO_ROW: u32 = u32::MAX;

/// The rows of a step: one for each choice of an expert that the layer holds. Rows are sorted by expert, and the rows
/// of one expert are in the order of their choices.
///
/// ```
/// use nvfp4_core::moe::Rows;
/// // Two tokens with two experts each, and a layer with three experts. The layer does not hold one expert of the
/// // second token.
/// let rows = Rows::new(&[2, 0, -1, 2], 2, 3, None);
/// assert_eq!(rows.firsts(), [0, 1, 1, 3]);
/// assert_eq!(rows.tokens(), [0, 0, 1]);
/// assert_eq!((0..4).map(|choice| rows.place(choice)).collect::<Vec<_>>(), [Some(1), Some(0), None, Some(2)]);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rows {
    firsts: Vec<u32>,
    tokens: Vec<u32>,
    places: Vec<u32>,
}

impl Rows {
    /// Makes the rows for `ids` `[T, k]` and a layer of `experts` experts. If there is an expert map, an id is an index
    /// into the map. The map's entry is the layer's own number of this expert, or negative if the layer does not hold
    /// the expert.
    ///
    /// # Panics
    /// If `top_k` is 0, there are more than `u32::MAX` choices, or an entry of the map is `experts` or more.
    pub fn new(ids: &[i32], top_k: usize, experts: usize, map: Option<&[i32]>) -> Self {
        assert!(u32::try_from(ids.len()).is_ok(), "at most 2³² − 1 choices");
        let expert = |&id: &i32| {
            let id = usize::try_from(id).ok()?;
            match map {
                Some(map) => usize::try_from(*map.get(id)?).ok(),
                None => (id < experts).then_some(id),
            }
        };
        let mut firsts = vec![0u32; experts + 1];
        for expert in ids.iter().filter_map(expert) {
            firsts[expert + 1] += 1;
        }
        for expert in 0..experts {
            firsts[expert + 1] += firsts[expert];
        }
        let mut next = firsts.clone();
        let (mut tokens, mut places) = (vec![0; firsts[experts] as usize], vec![NO_ROW; ids.len()]);
        for (choice, id) in ids.iter().enumerate() {
            if let Some(expert) = expert(id) {
                let row = next[expert];
                next[expert] += 1;
                tokens[row as usize] = (choice / top_k) as u32;
                places[choice] = row;
            }
        }
        Self { firsts, tokens, places }
    }

    /// `[E + 1]`: the first row of each expert, followed by the number of rows.
    pub fn firsts(&self) -> &[u32] {
        &self.firsts
    }

    /// Range of rows of an expert.
    pub fn of_expert(&self, expert: usize) -> std::ops::Range<usize> {
        self.firsts[expert] as usize..self.firsts[expert + 1] as usize
    }

    /// Token of each row.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Row of each choice t·k + j, or [`NO_ROW`].
    pub fn places(&self) -> &[u32] {
        &self.places
    }

    /// Row of choice t·k + j, if it has one.
    pub fn place(&self, choice: usize) -> Option<usize> {
        let row = self.places[choice];
        (row != NO_ROW).then_some(row as usize)
    }

    /// Number of rows.
    pub fn count(&self) -> usize {
        self.tokens.len()
    }

    /// Number of experts that have rows.
    pub fn hit_experts(&self) -> usize {
        self.firsts.windows(2).filter(|ends| ends[0] < ends[1]).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_out_of_range_have_no_row() {
        let rows = Rows::new(&[3, -1, i32::MIN, i32::MAX, 0, 0], 3, 3, None);
        assert_eq!((rows.firsts(), rows.tokens()), (&[0, 2, 2, 2][..], &[1, 1][..]));
        assert_eq!(rows.places(), [NO_ROW, NO_ROW, NO_ROW, NO_ROW, 0, 1]);
        assert_eq!((rows.count(), rows.hit_experts(), rows.of_expert(0)), (2, 1, 0..2));
    }

    #[test]
    fn a_map_renumbers_experts_and_drops_others() {
        let rows = Rows::new(&[0, 1, 2, 3, 4, -1], 2, 2, Some(&[1, -1, 0, -7]));
        assert_eq!((rows.firsts(), rows.tokens()), (&[0, 1, 2][..], &[1, 0][..]));
        assert_eq!(rows.places(), [1, NO_ROW, 0, NO_ROW, NO_ROW, NO_ROW]);
    }

    #[test]
    fn no_tokens_have_no_rows() {
        let rows = Rows::new(&[], 8, 512, None);
        assert_eq!((rows.count(), rows.hit_experts(), rows.firsts().len()), (0, 0, 513));
    }
}
