//! Decision trees: the code for a number in the program's memory, by the range that contains the
//! number.

use super::assembler::{Assembler, IF_AT_LEAST, IF_EQUAL, LOAD_CELL, Label};

/// The code for all numbers from the first one on, up to the next step. The first step begins with
/// 0.
type Step = (u128, Label);

/// Code that continues at the label of the range that contains the number, or at `otherwise`. The
/// number consists of 32 bits in each of the cells, the highest first; the ranges are sorted and
/// disjoint.
pub(super) fn put_search(
    code: &mut Assembler,
    cells: &[u32],
    ranges: impl IntoIterator<Item = (u128, u128, Label)>,
    otherwise: Label,
) -> Label {
    let largest = u128::MAX >> (128 - 32 * cells.len());
    let mut steps = vec![(0, otherwise)];
    for (first, last, label) in ranges {
        add_step(&mut steps, (first, label));
        if last < largest {
            add_step(&mut steps, (last + 1, otherwise));
        }
    }
    put_words(code, cells, &steps)
}

/// Appends a step; the last one is left out if it has no numbers, and the new one if it changes
/// nothing.
fn add_step(steps: &mut Vec<Step>, step: Step) {
    steps.pop_if(|last| last.0 == step.0);
    if steps.last().is_none_or(|last| last.1 != step.1) {
        steps.push(step);
    }
}

/// Decides by the first cell, then for some of its values by the others.
fn put_words(code: &mut Assembler, cells: &[u32], steps: &[Step]) -> Label {
    let (Some((cell, others)), true) = (cells.split_first(), steps.len() > 1) else {
        return steps[0].1;
    };
    let shift = 32 * others.len();
    let mut words = Vec::new();
    let mut before = steps[0].1;
    for group in steps.chunk_by(|one, two| one.0 >> shift == two.0 >> shift) {
        let word = group[0].0 >> shift;
        let mut inner = vec![(0, before)];
        for (start, label) in group {
            add_step(&mut inner, (start - (word << shift), *label));
        }
        before = inner[inner.len() - 1].1;
        add_step(&mut words, (word, put_words(code, others, &inner)));
        if word < u128::from(u32::MAX) {
            add_step(&mut words, (word + 1, before));
        }
    }
    if words.len() == 1 {
        return words[0].1;
    }
    let decision = put_tree(code, &words);
    code.put(LOAD_CELL, *cell, decision)
}

/// Decides by the accumulator.
fn put_tree(code: &mut Assembler, steps: &[Step]) -> Label {
    match steps {
        [(_, only)] => *only,
        [(_, outside), (value, inside), (next, after)]
            if outside == after && *next == value + 1 =>
        {
            code.put_branch(IF_EQUAL, low_word(*value), *inside, *outside)
        }
        _ => {
            // An odd number: a part that begins and ends outside of ranges can end with a
            // comparison for equality.
            let (low, high) = steps.split_at((steps.len() / 2) | 1);
            let (less, at_least) = (put_tree(code, low), put_tree(code, high));
            code.put_branch(IF_AT_LEAST, low_word(high[0].0), at_least, less)
        }
    }
}

/// The value of one cell, which has 32 bits, as the operand of an instruction.
fn low_word(number: u128) -> u32 {
    (number & 0xffff_ffff) as u32
}
