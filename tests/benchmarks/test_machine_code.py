"""What is read from machine code."""

from benchmarks.sass import count_load_rounds, outermost_loop

LOOP = """
        /*0000*/                   LDG.E.128 R60, desc[UR4][R2.64] ;
.L_x_0:
{body}
        /*0f00*/              @!P0 BRA `(.L_x_0) ;
        /*0f10*/                   LDG.E R61, desc[UR4][R60.64] ;
        /*0f20*/                   EXIT ;
"""
FIRST = "/*0010*/ @!P1 LDG.E.128 R4, desc[UR4][R2.64] ;"
SECOND = "/*0020*/ @!P1 LDG.E.64 R8, desc[UR4][R2.64+0x10] ;"
USE_FIRST = "/*0030*/ FADD R20, R7, R20 ;"  # R7 is the last of the four that FIRST loads
USE_SECOND = "/*0040*/ FADD R20, R9, R20 ;"
NUMBER = "/*0060*/ LDG.E R30, desc[UR4][R2.64+0x20] ;"
USE_NUMBER = "/*0070*/ FADD R20, R30, R20 ;"
STORE_FIRST = "/*0050*/ STG.E.128 desc[UR4][R40.64], R4 ;"


def test_rounds_of_loads():
    def rounds(*body):
        return count_load_rounds(outermost_loop(LOOP.format(body="\n".join(body))))

    assert rounds(USE_FIRST) == 0
    assert rounds(NUMBER, USE_NUMBER, FIRST, USE_FIRST) == 1
    assert rounds(FIRST, SECOND, USE_FIRST, USE_SECOND) == 1
    assert rounds(FIRST, USE_FIRST, SECOND, USE_SECOND) == 2
    assert rounds(FIRST, STORE_FIRST, SECOND, USE_SECOND) == 2
    assert rounds(FIRST, SECOND, USE_FIRST, FIRST, USE_SECOND, USE_FIRST) == 2  # one is ahead
