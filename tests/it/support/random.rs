//! Chance that a seed repeats.

/// A pseudo-random number generator: xorshift64 (Marsaglia, 2003). The state is not 0.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    /// Neighbouring seeds give unrelated sequences.
    pub(crate) fn of_seed(seed: u64) -> Random {
        let mut random = Random((seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        for _ in 0..8 {
            random.below(2);
        }
        random
    }

    pub(crate) fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % u64::try_from(limit).unwrap()).unwrap()
    }

    pub(crate) fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    pub(crate) fn any<'v, T>(&mut self, values: &'v [T]) -> &'v T {
        &values[self.below(values.len())]
    }

    pub(crate) fn pick<T: Copy>(&mut self, values: &[T]) -> T {
        *self.any(values)
    }
}
