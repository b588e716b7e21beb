// Drive the pendulum of examples/cpp over stdin and stdout, numbers as the hexadecimal digits of their bits.
//
//   begin ANGLE64 SPEED64    reset SEED    step32 TORQUE32    step64 TORQUE64
//
// Each answers with a line: the observation's three float32, the reward's float64, and whether it was truncated.
#include <cinttypes>
#include <iostream>
#include <string>

#include "pendulum_env.hpp"

namespace {

template <class To, class From>
To bits_as(From bits) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

}  // namespace

int main() {
    Pendulum pendulum;
    const plugrl::Spec spec = pendulum.spec();
    plugrl::Row row;
    row.data.resize(64);
    plugrl::Observation observation(spec, row);
    std::string command;
    std::uint64_t a = 0, b = 0;
    while (std::cin >> command >> std::hex >> a) {
        plugrl::Step done;
        if (command == "begin") {
            std::cin >> std::hex >> b;
            pendulum.begin(bits_as<double>(a), bits_as<double>(b));
            continue;
        }
        if (command == "reset") {
            pendulum.reset(a, observation);
        } else if (command == "step32") {
            const auto narrow = static_cast<std::uint32_t>(a);
            done = pendulum.step(plugrl::Action{reinterpret_cast<const char*>(&narrow), plugrl::Dtype::of<float>(), 1},
                                 observation);
        } else {
            done = pendulum.step(plugrl::Action{reinterpret_cast<const char*>(&a), plugrl::Dtype::of<double>(), 1},
                                 observation);
        }
        const float* seen = observation.at<float>(0);
        std::printf("%08" PRIx32 " %08" PRIx32 " %08" PRIx32 " %016" PRIx64 " %d\n", bits_as<std::uint32_t>(seen[0]),
                    bits_as<std::uint32_t>(seen[1]), bits_as<std::uint32_t>(seen[2]),
                    bits_as<std::uint64_t>(done.reward), done.truncated);
    }
    return 0;
}
