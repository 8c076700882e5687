-- Hand results of one work item off to the trainer. Only the first worker that calls this for an entry publishes, since
-- only one XACK succeeds. The worker writes output columns by a HSET in the same MULTI, before this script, with a time
-- to live that ends here; above maxmemory the server refuses that HSET, and the script gets them as inline fields.
-- KEYS  void, work, results, applied, trainer, ledger, sizes, output: output | void
-- ARGV  consumer group, entry id, batch id, header JSON, bytes of the output columns, payload bytes of the
--       trajectories they are for, number of inline fields of the output columns, their field, value ...; then
--       results (raw bytes) as field, value ...
-- Returns  1, or 0 when somebody else has finished the entry or the batch is gone: the output is unlinked; -1 when the
--          output had outlived its time: nothing has changed
-- include other_work
if tonumber(ARGV[5]) > 0 and ARGV[7] == '0' and redis.call('PERSIST', keys.output) == 0 then return -1 end
local first = not is_other_work(ARGV[2], ARGV[3]) and redis.call('XACK', keys.work, ARGV[1], ARGV[2]) == 1
if first then redis.call('XDEL', keys.work, ARGV[2]) end
if not first or redis.call('HEXISTS', keys.applied, ARGV[3]) == 0 then
  redis.call('UNLINK', keys.output)
  return 0
end
redis.call('HDEL', keys.trainer, 'failing')
local at = 8
for _ = 1, tonumber(ARGV[7]) do
  redis.call('HSET', keys.output, ARGV[at], ARGV[at + 1])
  at = at + 2
end
local output = tonumber(ARGV[5]) > 0 and keys.output or ''
local entry = {'batch', ARGV[3], 'header', ARGV[4], 'output', output, 'output_bytes', ARGV[5]}
for i = at, #ARGV do entry[#entry + 1] = ARGV[i] end
redis.call('XADD', keys.results, '*', unpack(entry))
redis.pcall('HINCRBY', keys.ledger, 'live_bytes', ARGV[5])
-- How much results need beside their payloads (lib/sizes), the last GiB counting most.
local into, out = redis.call('HINCRBY', keys.sizes, 'in', ARGV[6]), redis.call('HINCRBY', keys.sizes, 'out', ARGV[5])
if into > 2 ^ 30 then
  redis.call('HSET', keys.sizes, 'in', string.format('%d', into / 2), 'out', string.format('%d', out / 2))
end
return 1
