from rankless.records.check_results import make_pass


def run_check():
    return make_pass("clocks", "a clock ticks")
