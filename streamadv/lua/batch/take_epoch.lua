-- A training job takes the run: from now on the fence refuses what an older job still sends.
-- KEYS  void, session
-- ARGV  version to go on from ('' = the one after the last commit), epoch known to the job (its own, or of its
--       checkpoint: after data loss the server's epoch may be lower), the job, its session and the epoch
--       that founded it ('' = a new session: it takes the run from anybody), a nonce for a new session, epoch of its branch
--       ('' = it begins one), version at which that began ('' = that one to go on from), '1' if from a checkpoint,
--       world size of the job, how much the run had committed before the session ('' = a new session)
-- Returns  {epoch, session, version, committed, branch of what this session has committed, 0 = none}, or -1: a session
--          founded later has the run, or an older one, of which the run knew alone once a server had lost this one, and
--          that has committed since
local found = redis.call('HMGET', keys.session, 'epoch', 'committed', 'session', 'branch', 'committed_in')
local current, committed = tonumber(found[1] or '') or 0, found[2] or '0'
local epoch = string.format('%d', math.max(current, tonumber(ARGV[2])) + 1)
local session = ARGV[4]
if session == '' then
  session = epoch .. '-' .. ARGV[6]
elseif session ~= found[3] then
  local founded = tonumber(string.match(found[3] or '', '^(%d+)-') or '') or 0
  local is_committed = tonumber(committed) > tonumber(ARGV[11]) and found[5] ~= session
  if founded >= tonumber(ARGV[5]) or is_committed then return -1 end
end
local branch = ARGV[7] ~= '' and ARGV[7] or epoch
local version = ARGV[1] ~= '' and ARGV[1] or committed
redis.call('HSET', keys.session, 'epoch', epoch, 'job', ARGV[3], 'session', session, 'version', version,
  'branch', branch, 'loaded', ARGV[9] == '1' and branch or '', 'began', ARGV[8] ~= '' and ARGV[8] or version,
  'world_size', ARGV[10])
redis.call('HDEL', keys.session, 'end', 'ends')
return {tonumber(epoch), session, tonumber(version), tonumber(committed), found[5] == session and tonumber(found[4] or '') or 0}
