#define VIVACE_FLOAT32
#include "simd_avx2.h"

#include "numbers_float32.h"

#include "body.h"

const Body avx2_float32_body = BODY;
