#include "dtorch/promise/reservation.h"

namespace dtorch {
namespace {
AcceleratorValues accelerator_values;
}

Reservation::~Reservation() = default;

void SetAcceleratorValues(AcceleratorValues values) { accelerator_values = values; }
const AcceleratorValues& GetAcceleratorValues() { return accelerator_values; }

}  // namespace dtorch
