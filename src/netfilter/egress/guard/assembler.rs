//! An assembler of classic BPF for programs that are written from the end to the beginning: all
//! jumps go forward, so that the target of a jump is there before the jump.

use std::collections::BTreeMap;

use nix::libc;

use crate::netlink::traffic::program::ClassicInstruction;

/// An instruction of the program, counted from the last one.
pub(super) type Label = usize;

/// Operations on the accumulator A; K is the operand.
pub(super) const LOAD_BYTE: u32 = libc::BPF_LD | libc::BPF_B | libc::BPF_ABS;
pub(super) const LOAD_HALF: u32 = libc::BPF_LD | libc::BPF_H | libc::BPF_ABS;
pub(super) const LOAD_WORD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
/// At offset X + K of the frame.
pub(super) const LOAD_BYTE_AT_X: u32 = libc::BPF_LD | libc::BPF_B | libc::BPF_IND;
pub(super) const LOAD_HALF_AT_X: u32 = libc::BPF_LD | libc::BPF_H | libc::BPF_IND;
pub(super) const LOAD_LENGTH: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_LEN;
pub(super) const LOAD_NUMBER: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_IMM;
/// Cell K of the memory.
pub(super) const LOAD_CELL: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_MEM;
pub(super) const STORE_CELL: u32 = libc::BPF_ST;
pub(super) const AND: u32 = libc::BPF_ALU | libc::BPF_AND | libc::BPF_K;
pub(super) const ADD: u32 = libc::BPF_ALU | libc::BPF_ADD | libc::BPF_K;
pub(super) const OR_X: u32 = libc::BPF_ALU | libc::BPF_OR | libc::BPF_X;
pub(super) const SHIFT_LEFT: u32 = libc::BPF_ALU | libc::BPF_LSH | libc::BPF_K;
pub(super) const COPY_X: u32 = libc::BPF_MISC | libc::BPF_TXA;

/// Operations on the index register X.
pub(super) const LOAD_X_NUMBER: u32 = libc::BPF_LDX | libc::BPF_W | libc::BPF_IMM;
pub(super) const LOAD_X_CELL: u32 = libc::BPF_LDX | libc::BPF_W | libc::BPF_MEM;
/// The length of the IPv4 header at offset K.
pub(super) const LOAD_X_HEADER_LENGTH: u32 = libc::BPF_LDX | libc::BPF_B | libc::BPF_MSH;
pub(super) const STORE_X_CELL: u32 = libc::BPF_STX;
pub(super) const SET_X: u32 = libc::BPF_MISC | libc::BPF_TAX;

/// Conditions on A.
pub(super) const IF_EQUAL: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
pub(super) const IF_AT_LEAST: u32 = libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K;
pub(super) const IF_AT_LEAST_X: u32 = libc::BPF_JMP | libc::BPF_JGE | libc::BPF_X;
pub(super) const IF_BIT: u32 = libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K;

const JUMP: u32 = libc::BPF_JMP | libc::BPF_JA;
const RETURN: u32 = libc::BPF_RET | libc::BPF_K;

/// A program without its beginning.
#[derive(Debug)]
pub(super) struct Assembler {
    /// The last instruction first.
    reversed: Vec<ClassicInstruction>,
    /// The label of each operation by its code, operand and successors, so that equal code is
    /// written once.
    known: BTreeMap<(u32, u32, Label, Label), Label>,
    /// The newest jump to each label that is too far for a conditional jump.
    bridges: BTreeMap<Label, Label>,
}

impl Assembler {
    /// An empty program.
    pub(super) fn new() -> Assembler {
        Assembler { reversed: Vec::new(), known: BTreeMap::new(), bridges: BTreeMap::new() }
    }

    /// The program with its first instruction first.
    pub(super) fn into_program(mut self) -> Vec<ClassicInstruction> {
        self.reversed.reverse();
        self.reversed
    }

    /// Ends the program with a value.
    pub(super) fn put_return(&mut self, value: u32) -> Label {
        self.push(RETURN, value, 0, 0)
    }

    /// An operation, then the code at `next`.
    pub(super) fn put(&mut self, operation: u32, k: u32, next: Label) -> Label {
        let key = (operation, k, next, next);
        if let Some(known) = self.known.get(&key) {
            return *known;
        }
        if next + 1 != self.reversed.len() {
            self.put_jump(next);
        }
        let label = self.push(operation, k, 0, 0);
        self.known.insert(key, label);
        label
    }

    /// Several operations in this order, then the code at `next`.
    pub(super) fn put_all(&mut self, operations: &[(u32, u32)], next: Label) -> Label {
        operations.iter().rev().fold(next, |next, (operation, k)| self.put(*operation, *k, next))
    }

    /// The code at `yes` if the condition holds, otherwise the code at `no`.
    pub(super) fn put_branch(&mut self, condition: u32, k: u32, yes: Label, no: Label) -> Label {
        let key = (condition, k, yes, no);
        if yes == no {
            return yes;
        }
        if let Some(known) = self.known.get(&key) {
            return *known;
        }
        let (yes, no) = (self.bring_near(yes), self.bring_near(no));
        let [jt, jf] =
            [yes, no].map(|label| u8::try_from(self.distance_to(label)).unwrap_or(u8::MAX));
        let label = self.push(condition, k, jt, jf);
        self.known.insert(key, label);
        label
    }

    /// The number of instructions that an instruction in front of the program skips for reaching
    /// the label.
    fn distance_to(&self, label: Label) -> usize {
        self.reversed.len() - 1 - label
    }

    /// The label if a conditional jump reaches it, whose distance has 8 bits, even with one more
    /// instruction in between; otherwise the label of a jump to it.
    fn bring_near(&mut self, label: Label) -> Label {
        let there = [Some(label), self.bridges.get(&label).copied()]
            .into_iter()
            .flatten()
            .find(|at| self.distance_to(*at) < usize::from(u8::MAX));
        there.unwrap_or_else(|| {
            let bridge = self.put_jump(label);
            self.bridges.insert(label, bridge);
            bridge
        })
    }

    /// Writes an unconditional jump, also to a return instruction. A copy of the return would be
    /// rejected in some places: the kernel's check of loads takes the cells that are stored
    /// before a return for those that are stored behind it.
    fn put_jump(&mut self, label: Label) -> Label {
        let distance = u32::try_from(self.distance_to(label)).unwrap_or(u32::MAX);
        self.push(JUMP, distance, 0, 0)
    }

    fn push(&mut self, code: u32, k: u32, jt: u8, jf: u8) -> Label {
        self.reversed.push(ClassicInstruction { code: (code & 0xffff) as u16, jt, jf, k });
        self.reversed.len() - 1
    }
}
