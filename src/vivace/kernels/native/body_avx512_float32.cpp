#define VIVACE_FLOAT32
#include "simd_avx512.h"

#include "numbers_float32.h"

#include "body.h"

const Body avx512_float32_body = BODY;
