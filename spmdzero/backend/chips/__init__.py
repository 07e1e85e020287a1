"""TPU chips as the machine and the compiler know them: there or not, their torus, their flags."""
