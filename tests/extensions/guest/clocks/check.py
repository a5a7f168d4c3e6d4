from rankless.records.doctor_records import make_pass


def run_check():
    return make_pass("clocks", "a clock ticks")
