//! An interpreter of classic BPF that, unlike the kernel, fails at a load beyond the frame and at a
//! cell that was not stored.

use nix::libc::{
    BPF_ABS, BPF_ADD, BPF_ALU, BPF_AND, BPF_B, BPF_H, BPF_IMM, BPF_IND, BPF_JA, BPF_JEQ, BPF_JGE,
    BPF_JMP, BPF_JSET, BPF_K, BPF_LD, BPF_LDX, BPF_LEN, BPF_LSH, BPF_MEM, BPF_MISC, BPF_MSH,
    BPF_OR, BPF_RET, BPF_ST, BPF_STX, BPF_TAX, BPF_TXA, BPF_W, BPF_X,
};

use crate::netlink::traffic::program::ClassicInstruction;

/// What a load yields.
fn load(code: u32, k: u32, frame: &[u8], x: u32, cells: &[Option<u32>; 16]) -> u32 {
    if k == super::super::VLAN_TAG_PRESENT {
        return 0;
    }
    let bytes = |offset: u32, size: usize| {
        let bytes = &frame[offset as usize..offset as usize + size];
        bytes.iter().fold(0, |value, byte| value << 8 | u32::from(*byte))
    };
    let size = [(BPF_W, 4), (BPF_H, 2), (BPF_B, 1)]
        .into_iter()
        .find(|(bits, _)| *bits == code & 0x18)
        .unwrap()
        .1;
    match code & 0xe0 {
        BPF_ABS => bytes(k, size),
        BPF_IND => bytes(x + k, size),
        BPF_LEN => u32::try_from(frame.len()).unwrap(),
        BPF_IMM => k,
        BPF_MEM => cells[k as usize].unwrap(),
        BPF_MSH => (bytes(k, 1) & 0xf) * 4,
        _ => panic!("{code:#x}"),
    }
}

/// What the program returns.
pub(super) fn run_program(program: &[ClassicInstruction], frame: &[u8]) -> u32 {
    let (mut at, mut a, mut x, mut cells) = (0, 0_u32, 0_u32, [None; 16]);
    loop {
        let ClassicInstruction { code, jt, jf, k } = program[at];
        let code = u32::from(code);
        at += 1;
        let operand = if code & BPF_X == BPF_X { x } else { k };
        match code & 7 {
            BPF_LD => a = load(code, k, frame, x, &cells),
            BPF_LDX => x = load(code, k, frame, x, &cells),
            BPF_ST => cells[k as usize] = Some(a),
            BPF_STX => cells[k as usize] = Some(x),
            BPF_ALU => match code & 0xf0 {
                BPF_ADD => a = a.wrapping_add(operand),
                BPF_AND => a &= operand,
                BPF_OR => a |= operand,
                BPF_LSH => a <<= operand,
                _ => panic!("{code:#x}"),
            },
            BPF_JMP => {
                let holds = match code & 0xf0 {
                    BPF_JA => {
                        at += k as usize;
                        continue;
                    }
                    BPF_JEQ => a == operand,
                    BPF_JGE => a >= operand,
                    BPF_JSET => a & operand != 0,
                    _ => panic!("{code:#x}"),
                };
                at += usize::from(if holds { jt } else { jf });
            }
            BPF_MISC if code & 0xf8 == BPF_TAX => x = a,
            BPF_MISC if code & 0xf8 == BPF_TXA => a = x,
            BPF_RET if code & 0x18 == BPF_K => return k,
            _ => panic!("{code:#x}"),
        }
    }
}
