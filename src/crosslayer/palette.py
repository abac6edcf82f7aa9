"""The colours of figures: Okabe and Ito's palette, which colour-blind readers can tell apart."""

BLACK = "#000000"
HUES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
