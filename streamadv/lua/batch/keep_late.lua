-- Put what the trainer has made of trajectories of a batch beside the results of their groups, from where commit moves it
-- to the groups that are kept. A repeated call overwrites. `late_bytes` of the output is what of it `live_bytes` counts.
-- KEYS  trainer, applied, ledger, output: output
-- fenced by trainer
-- ARGV  fence, batch id, then of each trajectory: 'late:<rollout index>:<group id>', what was made of it
-- Returns  1, or 0 when the batch or the output is gone
if redis.call('HEXISTS', keys.applied, ARGV[2]) == 0 or redis.call('EXISTS', keys.output) == 0 then return 0 end
local bytes = 0
for i = 3, #ARGV, 2 do
  bytes = bytes + #ARGV[i + 1] - #(redis.call('HGET', keys.output, ARGV[i]) or '')
  redis.call('HSET', keys.output, ARGV[i], ARGV[i + 1])
end
redis.call('HINCRBY', keys.output, 'late_bytes', string.format('%d', bytes))
redis.pcall('HINCRBY', keys.ledger, 'live_bytes', string.format('%d', bytes))
return 1
