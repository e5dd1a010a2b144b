#define VIVACE_FLOAT32
#include "mixture.cpp"
