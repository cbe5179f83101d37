// surestep proto protos && npm install && node stream.js protos HOST:PORT TOKEN_ID...
// Set SURESTEP_API_KEY where the server was started with --grpc-api-key.
import { randomUUID } from 'node:crypto'
import grpc from '@grpc/grpc-js'
import { loadSync } from '@grpc/proto-loader'

const PATIENCE_MS = 60_000 // without a token
const RETRY_MS = 500
// Notices a server that hangs: connections stay up while the process behind them stands still.
const OPTIONS = { 'grpc.keepalive_time_ms': 5_000, 'grpc.keepalive_timeout_ms': 2_000 }

const [folder, address, ...prompt] = process.argv.slice(2)
const loaded = loadSync('surestep_proto/scheduler.proto', {
  includeDirs: [folder],
  keepCase: true,
  longs: String, // seeds have 64 bits
  enums: String,
  arrays: true, // empty ones too
})
const { Scheduler } = grpc.loadPackageDefinition(loaded).surestep.v1
const client = new Scheduler(address, grpc.credentials.createInsecure(), OPTIONS)
const metadata = new grpc.Metadata()
if (process.env.SURESTEP_API_KEY) metadata.set('authorization', `Bearer ${process.env.SURESTEP_API_KEY}`)

// Yields token ids of the answer, in as many calls as it takes.
async function* stream(request) {
  const name = request.request_id
  let lastToken = Date.now()
  for (let calls = 0; ; calls++) {
    request.request_id = `${name}.${calls}` // each call has an id of its own
    const call = client.Generate(request, metadata, { deadline: Date.now() + PATIENCE_MS })
    try {
      for await (const chunk of call) {
        if (chunk.start && !request.resolved) {
          // Another server, or the same one later, goes on as this one has begun.
          request.model_fingerprint = chunk.start.model_fingerprint
          request.resolved = chunk.start.resolved
        }
        request.emitted_ids.push(...chunk.token_ids)
        yield* chunk.token_ids
        if (chunk.token_ids.length) lastToken = Date.now()
        if (chunk.finish_reason) return
      }
    } catch (error) {
      if (error.code !== grpc.status.UNAVAILABLE || Date.now() - lastToken > PATIENCE_MS) throw error
    } finally {
      call.cancel()
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS))
  }
}

try {
  const request = {
    request_id: `example-${randomUUID()}`,
    prompt_ids: prompt.map(Number),
    emitted_ids: [],
    max_tokens: 24,
    sampling: { temperature: 0 }, // greedy; left out it would be the model's default
  }
  for await (const token of stream(request)) process.stdout.write(`${token} `)
  process.stdout.write('\n')
} catch (error) {
  const wrong = error.metadata?.get('surestep-param')[0] ?? ''
  console.error(`${grpc.status[error.code] ?? 'error'} ${wrong}: ${error.details ?? error}`)
  process.exitCode = 1
} finally {
  client.close()
}
