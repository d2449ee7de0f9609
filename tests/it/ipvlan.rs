//! ipvlan: lifecycle, modes, chained on another interface. Runs where the kernel has it.
