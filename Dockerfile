# Operator, gateway and the progress reader of driver pods: one image. Build from the repository root:
#   docker build -t everloop-operator .
FROM python:3.11-slim

ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONPATH=/opt/everloop \
    HOME=/tmp

COPY requirements/operator.txt /opt/everloop/requirements.txt
RUN pip install --no-cache-dir --no-deps --require-hashes -r /opt/everloop/requirements.txt \
    && python -m compileall -q "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

COPY operator/everloop_operator /opt/everloop/everloop_operator
COPY operator/everloop_gateway /opt/everloop/everloop_gateway
COPY operator/everloop_progress /opt/everloop/everloop_progress
RUN python -m compileall -q /opt/everloop/everloop_operator /opt/everloop/everloop_gateway /opt/everloop/everloop_progress \
    && useradd --uid 1000 --no-create-home --home-dir /tmp everloop

USER 1000:1000
EXPOSE 8000 8081
ENTRYPOINT ["python"]
