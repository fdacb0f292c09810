def write_report(run):
    pass
