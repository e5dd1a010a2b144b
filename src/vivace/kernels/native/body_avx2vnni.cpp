#include "ints_avx2.h"

#include "body.h"

const Body avx2vnni_body = BODY;
