"""Jobs over files: lines in, an answer for each line out, resumed after any end of the process.

A job is opened by its files and run, such as a batch of a server::

    opening = partial(open_batch, source=..., output=..., errors=..., identity={"endpoint": ...}, existing="resume")
    async with job_files(opening) as job:
        work = BatchWork(registry, BatchAnswers(job.journal.id), auto_truncate=True, tenant=tenant)
        summary = await job.run(work, window=BATCH_WINDOW, report=counts.set, stop=stop)

`report` gets the counts while the job runs. Setting `stop` ends the run in order, with its answers saved; so does
cancelling it, or a process that ends. The same call then goes on with the job. `finish(job.writer, job.journal)`
publishes the answers of a job that will not go on.
"""
