#include "ints_avx512.h"

#include "body.h"

const Body avx512_body = BODY;
